"""Warnings that point at the user's line, however deep in the package they are raised."""

import contextlib
import os
import sys
import threading
import warnings
import weakref

import torch

# Other frames may lie between the user's line and this package: torch, because its optimizers call hooks, and the
# modules that exit a context manager, run the function of a thread or import a module.
_FOLDERS = tuple(os.path.join(os.path.dirname(str(file)), "") for file in (__file__, torch.__file__))
_IMPORT = "<frozen importlib"
_FILES = (contextlib.__file__, threading.__file__, weakref.__file__)


class UncompressedParametersWarning(RuntimeWarning):
    """Parameters are sent in full precision, because the codec does not encode their dtype.

    Make it an error with `warnings.simplefilter("error", torchbagua.UncompressedParametersWarning)`: `attach` then
    raises it on all ranks, if the filter of any rank does.
    """


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Give a warning, by default a RuntimeWarning, at the innermost line that is neither torchbagua's nor torch's.

    torchbagua's own threads have no such line; the warning then points at the caller of this function.
    """
    caller = sys._getframe(1)
    frame = caller
    # warnings.warn has skip_file_prefixes only since Python 3.12.
    while not _is_users(frame.f_code.co_filename):
        if frame.f_back is None:
            frame = caller
            break
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<string>"),  # with None, nothing would be shown
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_user_during_error(message: str) -> None:
    """Warn as `warn_user` does while an exception propagates: if warnings are errors, print the message instead."""
    try:
        warn_user(message)
    except RuntimeWarning:
        sys.stderr.write(f"{message}\n")


def _is_users(filename: str) -> bool:
    return not filename.startswith((*_FOLDERS, _IMPORT)) and filename not in _FILES
