"""Encoding and decoding of QAdam's momenta in plain torch: a codec and a change of form, one after the other.

The CPU kernels take a few blocks at a time through both while the blocks are in the cache; the result is bitwise equal.
On a GPU, callers run the two operations one after the other. Momenta are flat tensors; each belongs to one parameter or
to a part of one, and together they are as long as the gradients. Each has a `beta1` and a `share`, see `qadam.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchbagua.native.ops import ELEMENTS, FLOATS, TABLE, WIRE, TensorKind, check_arguments, define_op, refusal
from torchbagua.native.qadam import qadam_form_gradients, qadam_form_momenta

if TYPE_CHECKING:
    from torchbagua.native.block_format import BlockFormat

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
