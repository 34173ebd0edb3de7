"""QAdam in plain torch, over lists of tensors; docs/arithmetic.md has the formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchbagua.native.ops import (
    ELEMENT_TYPES,
    ELEMENTS,
    FLOATS,
    check_arguments,
    define_op,
    describe_tensor,
    names_of,
    refusal,
)


def qadam_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    *,
    gradient_sign: float,
    weight_decay: float,
    shrink: float,
    beta1: float,
    root_correction2: float,
    eps: float,
    largest_ratio: float,
    step_size: float,
) -> None:
    """Update weights and momenta after the warm-up: in float32, or in float64 for float64 tensors."""
    for weight, gradient, momentum, second_moment in zip(weights, gradients, momenta, second_moments, strict=True):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        kept = weight.to(dtype) * shrink
        slope = gradient.to(dtype) * gradient_sign + kept * weight_decay
        moved = momentum.to(dtype) * beta1 + slope * (1.0 - beta1)
        variance = second_moment.to(dtype)
        denominator = torch.div(_square_root(variance), torch.full_like(variance, root_correction2)) + eps
        distance = torch.div(moved, denominator).clamp(-largest_ratio, largest_ratio) * step_size
        momentum.copy_(moved)
        weight.copy_(kept - torch.where(variance == 0, 0.0, distance))


def _square_root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root: torch's float32 sqrt on a CPU is sometimes off by one ulp."""
    return values.double().sqrt().to(values.dtype)


def qadam_form_momenta(gradients: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    """Replace each gradient, float32, by the momentum to send: `share` is (1 - beta1) / loss scale."""
    for gradient, momentum in zip(gradients, momenta, strict=True):
        gradient.mul_(share).add_(momentum.float() * beta1)


def qadam_form_gradients(averages: list[Tensor], momenta: list[Tensor], *, beta1: float, share: float) -> None:
    """Replace each averaged momentum, float32, by the gradient that yields it."""
    for average, momentum in zip(averages, momenta, strict=True):
        average.sub_(momentum.float() * beta1).div_(torch.full((1,), share, device=average.device))


def _check_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    **numbers: float,
) -> None:
    others = {"gradients": gradients, "momenta": momenta, "second_moments": second_moments}
    for name, tensors in others.items():
        _check_length("qadam_update", name, tensors, len(weights))
    for index, weight in enumerate(weights):
        if not weight.is_contiguous() or weight.dtype not in ELEMENT_TYPES:
            allowed = f"contiguous {names_of(*ELEMENT_TYPES)} on {weight.device}"
            raise refusal("qadam_update", "weights", allowed, describe_tensor(weight))
        for name, tensors in others.items():
            tensor = tensors[index]
            is_like = (tensor.shape, tensor.dtype, tensor.device) == (weight.shape, weight.dtype, weight.device)
            if not is_like or not tensor.is_contiguous():
                raise refusal("qadam_update", name, f"like weights, {describe_tensor(weight)}", describe_tensor(tensor))


def _check_form_momenta(gradients: list[Tensor], momenta: list[Tensor], **numbers: float) -> None:
    _check_forms("qadam_form_momenta", "gradients", gradients, momenta)


def _check_form_gradients(averages: list[Tensor], momenta: list[Tensor], **numbers: float) -> None:
    _check_forms("qadam_form_gradients", "averages", averages, momenta)


def _check_forms(operation: str, values_name: str, values: list[Tensor], momenta: list[Tensor]) -> None:
    _check_length(operation, "momenta", momenta, len(values))
    for value, momentum in zip(values, momenta, strict=True):
        check_arguments(operation, {values_name: FLOATS, "momenta": ELEMENTS}, value, momentum)


def _check_length(operation: str, name: str, tensors: list[Tensor], length: int) -> None:
    if len(tensors) != length:
        raise refusal(operation, name, f"a list of {length} tensors", f"a list of {len(tensors)}")


def _one_minus_beta1(numbers: Mapping[str, float]) -> list[float]:
    """Return the last number of QAdamStep in csrc_cuda/element/qadam.h: in float64, as in make_qadam_step."""
    return [1.0 - numbers["beta1"]]


define_op(
    "qadam",
    "update",
    _check_update,
    qadam_update,
    ("weights", "momenta"),
    derived_numbers=_one_minus_beta1,
)
define_op("qadam", "form_momenta", _check_form_momenta, qadam_form_momenta, ("gradients",))
define_op("qadam", "form_gradients", _check_form_gradients, qadam_form_gradients, ("averages",))
