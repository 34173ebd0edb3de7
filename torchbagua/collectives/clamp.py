"""The clamp that keeps averaged running statistics in range.

Shape suffix: N elements.
"""

import torch


def clamp_to_mean(value_N: torch.Tensor, own_N: torch.Tensor, mean_N: torch.Tensor) -> torch.Tensor:
    """Return `value_N` with each element clamped between the rank's own value and the mean.

    Running statistics decay. The difference between a mean and an older value can therefore exceed the current value,
    and a variance would become negative. The real and imaginary parts of complex numbers are clamped separately.
    """
    if value_N.is_complex():
        parts = [(tensor.real, tensor.imag) for tensor in (value_N, own_N, mean_N)]
        return torch.complex(*(clamp_to_mean(*same) for same in zip(*parts, strict=True)))
    return torch.clamp(value_N, torch.minimum(own_N, mean_N), torch.maximum(own_N, mean_N))
