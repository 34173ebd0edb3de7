"""The error of communication, and what torch's own errors say in one line."""

import re

# Where in gloo's or NCCL's sources something failed, on the machine that compiled them; and gloo's advice.
_PLACE = re.compile(r"\[(enforce fail at )?[^\]\s]+\.\w+:\d+\] ")
_PLACE_IN_TORCH = re.compile(r" in: \S+:\d+,")
_ADVICE = re.compile(r"\.? (This is typically caused by|Check the logs of).*")


class CommunicationError(RuntimeError):
    """An exchange with another rank failed or took longer than the timeout. Its group cannot be used any more."""


def cause_of(error: BaseException) -> str:
    """Return what `error`, of gloo, NCCL or a store, is about: one line, without places in torch's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = _PLACE_IN_TORCH.sub(":", _ADVICE.sub("", _PLACE.sub("", lines[0])))
    if "Last error:" in lines[:-1]:  # which is where NCCL says what the first line does not
        cause += f"; {lines[lines.index('Last error:') + 1]}"
    return cause
