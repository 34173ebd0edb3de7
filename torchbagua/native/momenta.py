"""QAdam's momenta on their way through a codec, in plain torch: the codec and a change of form, one after the other.

A CPU takes a few blocks at a time through both while they are in its cache, with the same bits; on a GPU callers take
the two operations in turn. Momenta are flat, those of one parameter or of a part of it each, and together as long as
the gradients. Each has a `beta1` and a `share`, see `qadam.py`.
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

# What tensors the operations have before the momenta, in their order, and which of these they write.
_OPERATIONS: dict[str, tuple[dict[str, TensorKind | None], tuple[str, ...]]] = {
    "encode_momenta": ({"gradients": FLOATS, "table": TABLE, "wire": WIRE}, ("wire",)),
    "encode_momenta_feedback": (
        {"gradients": FLOATS, "residual": FLOATS, "table": TABLE, "wire": WIRE, "left_out": FLOATS},
        ("wire", "left_out"),
    ),
    "decode_gradients": ({"wire": WIRE, "table": TABLE, "gradients": FLOATS}, ("gradients",)),
}


class MomentaFormat:
    """These operations of a codec."""

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
        """Encode the momenta that a rank sends, of its gradients."""
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
        """Encode these + residual, and write what the wire leaves out of that."""
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
        """Decode averaged momenta, and write the gradients that explain them; elements of no block stay."""
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


# The codecs that have these operations, by name. Filled at import: the files of codecs define them.
MOMENTA_CODECS: set[str] = set()


def define_momenta_operations(codec: BlockFormat) -> None:
    """Define the operations of a codec with kernels for them: csrc_cuda/cpu has them for every DenseCodec."""
    MOMENTA_CODECS.add(codec.name)
    momenta_format = MomentaFormat(codec)
    for suffix, (kinds, writes) in _OPERATIONS.items():
        check = functools.partial(_check, f"{codec.name}_{suffix}", kinds)
        define_op(codec.name, suffix, check, getattr(momenta_format, suffix), writes, is_of_cpus=True)


def _check(operation: str, kinds: dict[str, TensorKind | None], *arguments: Any, **by_name: Any) -> None:
    names = (*kinds, "momenta", "beta1s", "shares")
    given = dict(zip(names, arguments, strict=False)) | by_name
    check_arguments(operation, kinds, **{name: given[name] for name in kinds})
    gradients, momenta = given["gradients"], given["momenta"]
    for momentum in momenta:
        check_arguments(operation, {"gradients": FLOATS, "momenta": _MOMENTUM}, gradients, momentum)
    together = sum(momentum.numel() for momentum in momenta)
    if together != gradients.numel():
        raise refusal(operation, "momenta", f"as long as gradients together, {gradients.numel()}", together)
    for name in ("beta1s", "shares"):
        if len(given[name]) != len(momenta):
            raise refusal(operation, name, f"a list of {len(momenta)} numbers", f"a list of {len(given[name])}")
