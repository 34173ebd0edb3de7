"""The check of the values passed to aggregations."""

import torch


def check_values(subject: str, values: torch.Tensor) -> None:
    """Raise ValueError, with a message that begins with `subject`, unless `values` can be aggregated."""
    if values.layout is not torch.strided:
        raise ValueError(f"{subject} must be dense, got a {values.layout} tensor")
    if not values.is_complex() and values.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{subject} must be of float64, float32, bfloat16, float16 or complex, got {values.dtype}")
    if values.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{subject} must be on the CPU or on a CUDA device, got {values.device}")
