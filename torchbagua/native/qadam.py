"""QAdam in plain torch, over lists of tensors, and codecs over its momenta; docs/arithmetic.md has the formulas.

Momenta are flat tensors; each belongs to one parameter or to a part of one, and together they are as long as the
gradients. The CPU kernels take a few blocks at a time through a codec and a change of form while the blocks are in the
cache; the result is bitwise equal to one after the other, as callers run them on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbagua.native.ops import (
    ELEMENT_TYPES,
    ELEMENTS,
    FLOATS,
    TABLE,
    WIRE,
    TensorKind,
    check_arguments,
    define_op,
    describe_tensor,
    names_of,
    refusal,
)

if TYPE_CHECKING:
    from torchbagua.native.block_format import BlockFormat


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


define_op("qadam", "update", _check_update, qadam_update, ("weights", "momenta"), derived_numbers=_one_minus_beta1)
define_op("qadam", "form_momenta", _check_form_momenta, qadam_form_momenta, ("gradients",))
define_op("qadam", "form_gradients", _check_form_gradients, qadam_form_gradients, ("averages",))

_MOMENTUM = TensorKind(ELEMENTS.dtypes, ("M",))

# The tensor arguments of the operations before the momenta, in order, and the arguments that they write.
_OPERATIONS: dict[str, tuple[dict[str, TensorKind | None], tuple[str, ...]]] = {
    "encode_momenta": ({"gradients": FLOATS, "table": TABLE, "wire": WIRE}, ("wire",)),
    "encode_momenta_feedback": (
        {"gradients": FLOATS, "residual": FLOATS, "table": TABLE, "wire": WIRE, "left_out": FLOATS},
        ("wire", "left_out"),
    ),
    "decode_gradients": ({"wire": WIRE, "table": TABLE, "gradients": FLOATS}, ("gradients",)),
}


class MomentaFormat:
    """The operations of a codec over QAdam's momenta."""

    def __init__(self, codec: BlockFormat) -> None:
        self._codec = codec

    def encode_momenta(
        self,
        gradients: Tensor,
        table: Tensor,
        wire: Tensor,
        momenta: list[Tensor],
        beta1s: list[float],
        shares: list[float],
    ) -> None:
        """Encode the momenta that a rank sends, computed from its gradients."""
        sent = _change_form(qadam_form_momenta, gradients.clone(), momenta, beta1s, shares)
        self._codec.encode(sent, table, wire)

    def encode_momenta_feedback(
        self,
        gradients: Tensor,
        residual: Tensor,
        table: Tensor,
        wire: Tensor,
        left_out: Tensor,
        momenta: list[Tensor],
        beta1s: list[float],
        shares: list[float],
    ) -> None:
        """Encode these momenta + residual, and write the new residual to left_out."""
        sent = _change_form(qadam_form_momenta, gradients.clone(), momenta, beta1s, shares)
        self._codec.encode_feedback(sent, residual, table, wire, left_out)

    def decode_gradients(
        self,
        wire: Tensor,
        table: Tensor,
        gradients: Tensor,
        momenta: list[Tensor],
        beta1s: list[float],
        shares: list[float],
    ) -> None:
        """Decode averaged momenta and write the gradients that yield them; elements outside the blocks stay."""
        averages = torch.zeros_like(gradients)
        self._codec.decode(wire, table, averages)
        found = _change_form(qadam_form_gradients, averages, momenta, beta1s, shares)
        for start, length in table[:, :2].tolist():
            gradients[start : start + length] = found[start : start + length]


def _change_form(
    change: Callable[..., None], values: Tensor, momenta: list[Tensor], beta1s: list[float], shares: list[float]
) -> Tensor:
    """Change the form of values in place, and return them."""
    parts = values.split([momentum.numel() for momentum in momenta])
    for part, momentum, beta1, share in zip(parts, momenta, beta1s, shares, strict=True):
        change([part], [momentum], beta1=beta1, share=share)
    return values


# The names of the codecs with these operations. Filled at import: the modules of the codecs define them.
MOMENTA_CODECS: set[str] = set()


def define_momenta_operations(codec: BlockFormat) -> None:
    """Define these operations for a codec that has kernels for them: in csrc_cuda/cpu, every DenseCodec has them."""
    MOMENTA_CODECS.add(codec.name)
    momenta_format = MomentaFormat(codec)
    for suffix, (kinds, writes) in _OPERATIONS.items():
        check = functools.partial(_check, f"{codec.name}_{suffix}", kinds)
        define_op(codec.name, suffix, check, getattr(momenta_format, suffix), writes, is_cpu_only=True)


def _check(operation: str, kinds: dict[str, TensorKind | None], *arguments: Any, **by_name: Any) -> None:
    names = (*kinds, "momenta", "beta1s", "shares")
    given = dict(zip(names, arguments, strict=False)) | by_name
    check_arguments(operation, kinds, **{name: given[name] for name in kinds})
    gradients, momenta = given["gradients"], given["momenta"]
    for momentum in momenta:
        check_arguments(operation, {"gradients": FLOATS, "momenta": _MOMENTUM}, gradients, momentum)
    total = sum(momentum.numel() for momentum in momenta)
    if total != gradients.numel():
        raise refusal(operation, "momenta", f"of the same total length as gradients, {gradients.numel()}", total)
    for name in ("beta1s", "shares"):
        if len(given[name]) != len(momenta):
            raise refusal(operation, name, f"a list of {len(momenta)} numbers", f"a list of {len(given[name])}")
