"""The error of communication, and one-line causes extracted from torch's own errors."""

import re

# The place of the failure in gloo's or NCCL's sources, as a path on the machine that compiled them, and gloo's advice.
_PLACE = re.compile(r"\[(enforce fail at )?[^\]\s]+\.\w+:\d+\] ")
_PLACE_IN_TORCH = re.compile(r" in: \S+:\d+,")
_ADVICE = re.compile(r"\.? (This is typically caused by|Check the logs of).*")


BUSY_ADVICE = (
    "if it is only busy, as while it evaluates or saves alone, pass a longer attach(..., timeout=timedelta(...)), or "
    "reify(..., timeout=...) with a standalone hook"
)
"""The cure for a timeout, if the rank that did not communicate is neither dead nor blocked."""


class CommunicationError(RuntimeError):
    """An exchange with another rank failed or timed out. The group can no longer be used."""


class OutOfStep(CommunicationError):
    """Ranks have met at different points of the training."""


def cause_of(error: BaseException) -> str:
    """Return the cause of an `error` of gloo, NCCL or a store, in one line and without places in torch's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = _PLACE_IN_TORCH.sub(":", _ADVICE.sub("", _PLACE.sub("", lines[0])))
    if "Last error:" in lines[:-1]:  # where NCCL reports the cause that its first line lacks
        cause += f"; {lines[lines.index('Last error:') + 1]}"
    return cause
