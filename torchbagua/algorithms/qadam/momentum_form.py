"""The form in which QAdam averages gradients: as momenta.

Shape suffixes: N elements, W wire bytes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.block_codec import NativeBlockCodec
from torchbagua.codecs.blocks import WireLayout
from torchbagua.collectives.value_form import CodecOf
from torchbagua.native.momenta import MOMENTA_CODECS
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.memory_order import flat_length
from torchbagua.runtime.runner import Runner

# In elements. A longer block does not stay in a core's cache between the computation and the encoding of its momenta.
_LONGEST_BLOCK = 1 << 15


class MomentumForm:
    """The form in which a bucket's gradients are averaged, see `MomentumMean`.

    On a rank that has joined, the mean remains a momentum.

    Args:
        runner: the impl's runner, which knows the loss scale and whether the rank has joined.
        q_adam: the optimizer, which stores the momenta and the betas.
        bucket: a float32 bucket of parameters past their warm-up.
    """

    def __init__(self, runner: Runner, q_adam: QAdamOptimizer, bucket: BaguaBucket) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._tensors = bucket.tensors
        self._tracer = bucket.group.tracer
        *self._starts, self._num_elements = accumulate(
            (flat_length(tensor.parameter) for tensor in bucket.tensors), initial=0
        )

    def codec_of(self, compressor: Compressor) -> CodecOf:
        momenta = self._momenta()
        make = _OnePassCodec if self._is_one_pass(compressor) else _TwoPassCodec
        has_joined = self._runner.has_joined

        @cache  # most ranges are both encoded and decoded
        def codec_between(start: int, stop: int) -> Compressor:
            return make(compressor, self._slice(momenta, start, stop), keeps_mean=has_joined)

        return lambda elements: codec_between(elements.start, elements.stop)

    def change(self, x_N: torch.Tensor) -> None:
        self._momenta().change(torch.ops.torchbagua.qadam_form_momenta, x_N)

    def change_back(self, x_N: torch.Tensor) -> None:
        if not self._runner.has_joined:
            self._momenta().change(torch.ops.torchbagua.qadam_form_gradients, x_N)

    def take_step(self, mean_N: torch.Tensor) -> None:
        """Replace the mean of momenta in place by the momentum that the optimizer's step computes via the gradient."""
        momenta = self._momenta()
        momenta.change(torch.ops.torchbagua.qadam_form_gradients, mean_N)
        mean_N.div_(self._runner.loss_scale)
        unscaled = momenta._replace(shares=[1.0 - beta1 for beta1 in momenta.beta1s])
        unscaled.change(torch.ops.torchbagua.qadam_form_momenta, mean_N)

    def _is_one_pass(self, compressor: Compressor) -> bool:
        """Return whether a kernel computes and encodes momenta in one pass. Sampling observers need separate passes."""
        return (
            isinstance(compressor, NativeBlockCodec)
            and compressor.op_prefix in MOMENTA_CODECS
            and compressor.codes_blocks_alone
            and compressor.block_elements <= _LONGEST_BLOCK
            and self._tensors[0].parameter.device.type == "cpu"
            and not self._tracer.samples
        )

    def _momenta(self) -> "_Momenta":
        """Return the momenta of the whole bucket.

        The share of a gradient is (1 - beta1) / loss scale: gradients contain the scale, momenta do not.
        """
        state, beta1_of, scale = self._q_adam.state, self._q_adam.beta1_of, self._runner.loss_scale
        tensors = [tensor.order.flatten(state[tensor.parameter]["exp_avg"]) for tensor in self._tensors]
        beta1s = [beta1_of(tensor.parameter) for tensor in self._tensors]
        return _Momenta(tensors, beta1s, [(1.0 - beta1) / scale for beta1 in beta1s])

    def _slice(self, momenta: "_Momenta", start: int, stop: int) -> "_Momenta":
        """Return the momenta of the bucket's elements from `start` to `stop`."""
        if (start, stop) == (0, self._num_elements):
            return momenta
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        parts = [
            tensor[max(start - tensor_start, 0) : stop - tensor_start]
            for tensor, tensor_start in zip(momenta.tensors[first:last], self._starts[first:last], strict=True)
        ]
        return _Momenta(parts, momenta.beta1s[first:last], momenta.shares[first:last])


class _Momenta(NamedTuple):
    """The momenta of several gradients, [N] in total, and the beta1 and share of each."""

    tensors: list[torch.Tensor]
    beta1s: list[float]
    shares: list[float]

    def change(self, operation: Callable[..., None], x_N: torch.Tensor) -> None:
        """Change the form of these gradients' values in place, in one call for each distinct beta1 and share."""
        groups: dict[tuple[float, float], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        parts = x_N.split([tensor.numel() for tensor in self.tensors])
        for part, tensor, beta1, share in zip(parts, self.tensors, self.beta1s, self.shares, strict=True):
            groups.setdefault((beta1, share), []).append((part, tensor))
        for (beta1, share), pairs in groups.items():
            operation(*map(list, zip(*pairs, strict=True)), beta1=beta1, share=share)


class _TwoPassCodec(Compressor):
    """Encodes gradients as momenta and decodes averaged momenta to gradients, each in two successive operations."""

    def __init__(self, compressor: Compressor, momenta: _Momenta, *, keeps_mean: bool) -> None:
        self._compressor = compressor
        self._momenta = momenta
        self._keeps_mean = keeps_mean

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return self._compressor.wire_bytes(num_elements, num_blocks, dtype)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        self._momenta.change(torch.ops.torchbagua.qadam_form_momenta, x_N)
        self._compressor.encode(x_N, layout, wire_W)

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        self._momenta.change(torch.ops.torchbagua.qadam_form_momenta, x_N)
        self._compressor.encode_feedback(x_N, residual_N, layout, wire_W, left_out_N)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        self._compressor.decode(wire_W, layout, x_N)
        if not self._keeps_mean:
            self._momenta.change(torch.ops.torchbagua.qadam_form_gradients, x_N)


class _OnePassCodec(_TwoPassCodec):
    """Uses kernels that perform both operations while a group of blocks is in the cache."""

    _compressor: NativeBlockCodec

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        self._compressor.native_op("encode_momenta")(x_N, layout.table, wire_W, *self._momenta)

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        op = self._compressor.native_op("encode_momenta_feedback")
        op(x_N, residual_N, layout.table, wire_W, left_out_N, *self._momenta)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        if self._keeps_mean:
            self._compressor.decode(wire_W, layout, x_N)
        else:
            self._compressor.native_op("decode_gradients")(wire_W, layout.table, x_N, *self._momenta)
