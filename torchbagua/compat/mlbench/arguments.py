"""What aggregations are given: observers and values, checked."""

from collections.abc import Sequence

import torch

from torchbagua import Observer
from torchbagua.observe import Trace


def check_observers(owner: str, observers: Sequence[Observer]) -> None:
    """Raise TypeError, which names `owner`, unless these are observers; ValueError where a trace cannot serve again."""
    if not isinstance(observers, list | tuple):
        raise TypeError(f"{owner}: observers must be a list of objects with a method on_comm(event), got {observers!r}")
    for observer in observers:
        if isinstance(observer, type) or not callable(getattr(observer, "on_comm", None)):
            raise TypeError(f"{owner}: an observer must be an object with a method on_comm(event), got {observer!r}")
        if isinstance(observer, Trace):
            observer.check()


def check_values(subject: str, values: torch.Tensor) -> None:
    """Raise ValueError, which begins with `subject`, unless `values` can be aggregated."""
    if values.layout is not torch.strided:
        raise ValueError(f"{subject} must be dense, got a {values.layout} tensor")
    if not values.is_complex() and values.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{subject} must be of float64, float32, bfloat16, float16 or complex, got {values.dtype}")
    if values.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{subject} must be on the CPU or on a CUDA device, got {values.device}")
