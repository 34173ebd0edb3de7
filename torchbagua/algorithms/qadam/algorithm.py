"""QAdam: after a warm-up, ranks send only Adam's momentum, in 8 bits or in one bit.

On rank i of n, with the symbols of 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1): codec C, and the residuals
delta_i and delta, which are zero without error feedback. optimizer.py takes the step.

    g_i = gradient of f_i(x)                                    # backward, on rank i
    for each bucket that backward has filled:                   # on the lane, while backward continues
        if t <= T_w: g = (g_1 + ... + g_n) / n                  # warm-up
        else:
            m_i = beta1 m + (1 - beta1) g_i
            send C(m_i + delta_i), one chunk to each rank
            send C(mean over i of C(m_i + delta_i) + delta) to all ranks; mbar = the result of all chunks
            g = (mbar - beta1 m) / (1 - beta1)                  # from which the step computes mbar
    step with g; if it was not skipped: update delta_i and delta as in algorithms/gradient/compressed.py

Shape suffixes: N elements, W wire bytes.
"""

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from torchbagua import _concurrency
from torchbagua.algorithms.base import Algorithm, check_codecs, check_flags, register
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.codecs.base import REGISTRY, Compressor, Identity, TensorSpec, WireLayout, by_name, needs_feedback
from torchbagua.codecs.block_codec import NativeBlockCodec
from torchbagua.codecs.sign1bit import Sign1Bit
from torchbagua.collectives.agreement import Progress, agree, require_same_progress, stable_repr
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.native.qadam import MOMENTA_CODECS
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.lane import Job
from torchbagua.runtime.optimizer_steps import parameters_of, unwrap
from torchbagua.runtime.parameter_state import ParameterState, residual_state
from torchbagua.runtime.parameters import flat_length
from torchbagua.runtime.runner import AlgorithmImpl
from torchbagua.runtime.sub_buckets import append_sub_buckets, sub_bucket_of


class WarmupAgreement:
    """Compares the ranks' progress past the warm-up in each backward. If it differs, all ranks raise.

    The form of the sent data may also change after the warm-up, when a state is loaded, and a rank that has not loaded
    the state does not know of the change. Ranks with messages of different lengths would block forever.

    The lane runs the comparison before the buckets that are submitted to it. In stream order, however, buckets do not
    wait for their turn in the lane, and the host would have to wait for the buckets of all ranks. So each backward has
    two comparisons, in the same order on all ranks:

    1. At the end of the preceding step, or in the backward if that step was skipped: compare the expected progress at
       the start of the backward. The backward waits for this comparison. A forward runs in between, so the comparison
       has usually finished by then.
    2. In the backward: compare the actual progress at its start. A rank waits for this comparison only if the progress
       differs from the first comparison because a state was loaded. The rank sends nothing before that, and the lanes
       of ranks that have not loaded the state fail.
    """

    def __init__(self, runner: GradientRunner, q_adam: QAdamOptimizer) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._announced: tuple[Progress, Job[None]] | None = None
        self._confirmation: Job[None] | None = None
        self._is_listening = False

    def compare(self, device: torch.device) -> None:
        """Compare the progress. Called at the first bucket of each backward."""
        world = self._runner.process_group.world
        if not world.in_stream_order(device):
            self._submit(self._progress())
            return
        self._listen()
        progress = self._progress()
        announced, agreement = self._announced or (progress, self._submit(progress))
        self._announced = None
        agreement.result()
        self._confirmation = self._submit(progress)
        if progress != announced:
            self._confirmation.result()

    def _progress(self) -> Progress:
        num_updates = self._q_adam.num_updates_past_warmup.values()
        numbers = {
            "parameters past their warm-up": len(num_updates),
            "updates of parameters past their warm-up": sum(num_updates),
        }
        return Progress("the gradients", numbers, self._runner.gradient_buckets.layout_watch.changed_parameter)

    def _submit(self, progress: Progress) -> Job[None]:
        world, layout_watch = self._runner.process_group.world, self._runner.gradient_buckets.layout_watch

        def compare() -> None:
            of_ranks = agree(world, progress, progress.call)
            layout_watch.check([each.changed_parameter for each in of_ranks])
            require_same_progress(world, of_ranks)

        return self._runner.submit_agreement(compare)

    def _listen(self) -> None:
        """Announce at the end of each step from now on. The optimizer, which may live longer, keeps no reference."""
        watch = next((watch for watch in self._runner.step_watches if watch.optimizer is self._q_adam), None)
        if watch is None or self._is_listening:
            return
        self._is_listening = True
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
            if (agreement := reference()) is not None:
                agreement._raise_if_refused()
                agreement._announce()

        watch.add(after_step, reads_overflow=False)
        _concurrency.finalize(self, watch.remove, after_step).atexit = False
        self._runner.on_close(partial(watch.remove, after_step), first=True)
        self._runner.on_joined_backward(self._announce)  # a joined rank takes no steps, the others announce at theirs
        self._runner.on_close(self._announce_at_end, first=True)

    def _raise_if_refused(self) -> None:
        """Raise an error that this backward's comparison has already found, before the host waits for a stuck GPU."""
        if self._confirmation is not None and self._confirmation.is_done():
            self._confirmation.result()

    def _announce_at_end(self) -> None:
        """Announce if this rank's last backward had no step. Other ranks may have stepped, and all must compare."""
        if self._runner.ends_in_order and not self._runner.lane.has_failed:
            self._announce()

    def _announce(self) -> None:
        if self._announced is None:  # after several steps without a backward, the first announcement remains valid
            progress = self._progress()
            self._announced = progress, self._submit(progress)


# In elements. A longer block does not stay in a core's cache between the computation and the encoding of its momenta.
_LONGEST_BLOCK = 1 << 15


class MomentumForm:
    """Converts a bucket's gradients to momenta, and their mean back to gradients, see `MomentumMean`.

    On CPUs, the kernels of `codec` perform both conversions while they encode and decode. Otherwise, `begin` and `end`
    convert in separate passes, and the mean in between does not know of gradients.

    On a rank that has joined, the mean remains a momentum.

    Attributes:
        codec: the codec of the mean.
    """

    def __init__(
        self, runner: GradientRunner, q_adam: QAdamOptimizer, bucket: BaguaBucket, *, is_of_nodes: bool
    ) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._tensors = bucket.tensors
        self._tracer = bucket.group.tracer
        *self._starts, self._num_elements = accumulate(
            (flat_length(tensor.parameter) for tensor in bucket.tensors), initial=0
        )
        self.codec: Compressor = runner.codec
        self._momenta_codec: _MomentaCodec | None = None
        if (
            isinstance(runner.codec, NativeBlockCodec)
            and runner.codec.op_prefix in MOMENTA_CODECS
            and runner.codec.blocks_are_independent
            and runner.codec.block_elements <= _LONGEST_BLOCK
            and bucket.flat.device.type == "cpu"
            and not is_of_nodes
        ):
            self.codec = self._momenta_codec = _MomentaCodec(runner.codec)
        self._is_one_pass = False

    def begin(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        """Prepare the mean of the bucket."""
        momenta = self._momenta()
        if self._momenta_codec is not None:
            # Observers that sample this step need separate passes.
            self._is_one_pass = not self._tracer.samples
            # Most ranges are both encoded and decoded.
            momenta_between = cache(partial(self._slice, momenta)) if self._is_one_pass else None
            self._momenta_codec.begin(momenta_between, keeps_mean=self._runner.has_joined)
        if not self._is_one_pass:
            momenta.change(torch.ops.torchbagua.qadam_form_momenta, bucket.flat)

    def end(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        """Complete the mean of the bucket."""
        if not (self._is_one_pass or self._runner.has_joined):
            self._momenta().change(torch.ops.torchbagua.qadam_form_gradients, bucket.flat)

    def take_step(self, mean_N: torch.Tensor) -> None:
        """Replace the mean of momenta in place by the momentum that the optimizer's step computes via the gradient."""
        momenta = self._momenta()
        momenta.change(torch.ops.torchbagua.qadam_form_gradients, mean_N)
        mean_N.div_(self._runner.loss_scale)
        unscaled = momenta._replace(shares=[1.0 - beta1 for beta1 in momenta.beta1s])
        unscaled.change(torch.ops.torchbagua.qadam_form_momenta, mean_N)

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


class _MomentaCodec(Compressor):
    """Encodes gradients as momenta, and decodes averaged momenta to gradients, while a few blocks are in the cache.

    Its wires are those of `codec`, which computes the mean of momenta.
    """

    def __init__(self, codec: NativeBlockCodec) -> None:
        self._codec = codec
        self._momenta_between: Callable[[int, int], _Momenta] | None = None
        self._keeps_mean = False

    def __repr__(self) -> str:
        return repr(self._codec)

    def begin(self, momenta_between: Callable[[int, int], _Momenta] | None, *, keeps_mean: bool) -> None:
        """Prepare for one mean."""
        self._momenta_between = momenta_between
        self._keeps_mean = keeps_mean

    @property
    def block_elements(self) -> int:
        return self._codec.block_elements

    def encodes(self, dtype: torch.dtype) -> bool:
        return self._codec.encodes(dtype)

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return self._codec.wire_bytes(num_elements, num_blocks, dtype)

    def layout(self, spec: TensorSpec, cuts: Sequence[int], *, equal_bytes: bool = False) -> WireLayout:
        return self._codec.layout(spec, cuts, equal_bytes=equal_bytes)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        if self._momenta_between is None:
            self._codec.encode(x_N, layout, wire_W)
        else:
            self._codec.native_op("encode_momenta")(x_N, layout.table, wire_W, *self._momenta_of(x_N, layout))

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        if self._momenta_between is None or self._keeps_mean:
            self._codec.decode(wire_W, layout, x_N)
        else:
            self._codec.native_op("decode_gradients")(wire_W, layout.table, x_N, *self._momenta_of(x_N, layout))

    def encode_feedback(
        self,
        x_N: torch.Tensor,
        residual_N: torch.Tensor,
        layout: WireLayout,
        wire_W: torch.Tensor,
        left_out_N: torch.Tensor,
    ) -> None:
        if self._momenta_between is None:
            self._codec.encode_feedback(x_N, residual_N, layout, wire_W, left_out_N)
        else:
            op = self._codec.native_op("encode_momenta_feedback")
            op(x_N, residual_N, layout.table, wire_W, left_out_N, *self._momenta_of(x_N, layout))

    def decode_mean(self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, x_N: torch.Tensor) -> None:
        self._codec.decode_mean(wires_RW, layout, divisor, x_N)

    def decode_mean_encode(
        self, wires_RW: torch.Tensor, layout: WireLayout, divisor: float, wire_W: torch.Tensor
    ) -> None:
        self._codec.decode_mean_encode(wires_RW, layout, divisor, wire_W)

    def decode_mean_encode_feedback(self, wires_RW: torch.Tensor, *arguments: Any) -> None:
        self._codec.decode_mean_encode_feedback(wires_RW, *arguments)

    def _momenta_of(self, x_N: torch.Tensor, layout: WireLayout) -> _Momenta:
        assert self._momenta_between is not None
        return self._momenta_between(layout.start, layout.start + x_N.numel())


class MomentumMean:
    """Appends operations to a bucket that average its gradients as momenta.

    A gradient g is sent as b1 m + (1 - b1) g, and `.grad` is set to (mean - b1 m) / (1 - b1), from which the
    optimizer's step reconstructs the mean. On CPUs, the codec's kernels perform both conversions while they encode and
    decode.
    """

    def __init__(
        self,
        runner: GradientRunner,
        q_adam: QAdamOptimizer,
        residuals: ParameterState[TwoPhaseResiduals] | None,
        *,
        hierarchical: bool,
    ) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._residuals = residuals
        self._hierarchical = hierarchical

    def append(self, bucket: BaguaBucket) -> None:
        """Append the operations to `bucket`, a float32 bucket of parameters past their warm-up."""
        feedback = None
        if self._residuals is not None:
            feedback = self._residuals.of_bucket(bucket)
            bucket.append_local_op(self._residuals.resolve_last_backward)
        is_of_nodes = self._hierarchical and bucket.group.intra_node is not None
        form = MomentumForm(self._runner, self._q_adam, bucket, is_of_nodes=is_of_nodes)
        bucket.append_local_op(form.begin)
        bucket.append_centralized_synchronous_op(
            hierarchical=self._hierarchical, compression=form.codec, error_feedback=feedback
        )
        bucket.append_local_op(form.end)

        def adopt_if_joined(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            if self._runner.has_joined:
                self._adopt_momenta(bucket, form)

        bucket.append_local_op(adopt_if_joined)

    @torch.no_grad()
    def _adopt_momenta(self, bucket: BaguaBucket, form: MomentumForm) -> None:
        """Update the momenta as the steps of the other ranks do.

        This rank has joined and takes no steps, but must not send stale momenta.
        """
        if self._residuals is not None:
            self._residuals.commit_without_step(bucket)
        if not bool(bucket.flat.isfinite().all()):  # the other ranks skip this step
            return
        form.take_step(bucket.flat)
        for tensor, momentum in bucket.views(bucket.flat):
            self._q_adam.adopt_momentum(tensor.parameter, momentum)


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Average gradients in full precision while QAdamOptimizer warms up, and compressed momenta after the warm-up.

    After the warm-up, rank i computes the momentum m_i = b1 m + (1 - b1) g_i from its own gradient g_i. The mean of m_i
    over the ranks is computed as ByteGrad computes the mean of gradients (1-bit Adam, Tang et al., arXiv 2102.02888;
    Bagua, arXiv 2107.01499). Then `.grad` is set to (mean - b1 m) / (1 - b1), from which the optimizer's step
    reconstructs the mean. So GradScaler, clipping and other code that runs between backward and step act on a gradient.

    In 8 bits, the norm of `.grad` is within a few percent of the norm of the mean gradient. In one bit, it is two to
    many times as large, because all momenta of a block have the same magnitude: clip only during the warm-up. Gradients
    of float64 parameters, and of parameters of other optimizers, are averaged in full precision.

    With error feedback, each rank adds the residual of its previous momentum to its momentum. The mean has residuals
    too (1-bit Adam, algorithm 1). Memory and rules are those of `ByteGradAlgorithm`, except that `comm_hook` needs no
    `optimizer`. A new attachment starts from zero, or from a state with the same `error_feedback` and `compression`.

    With `torch.distributed.algorithms.Join`, a rank that has run out of data takes no more steps, and its momenta
    follow those of the other ranks. They are bitwise equal if the other ranks neither clip gradients nor use a weight
    decay that is not decoupled. The warm-up of the joined rank is frozen: if the warm-up of the other ranks ends
    meanwhile, all ranks raise.

    Args:
        q_adam_optimizer: the optimizer that you attach together with this algorithm.
        hierarchical: with multi-node groups that have several ranks per node, use full precision within nodes and
            compression between them.
        compression: the codec for momenta: its name (see `torchbagua.codecs`) or a Compressor, which may be your own or
            have other blocks, such as `MinMaxUInt8(block=512)`. "sign1bit" needs `error_feedback`. "topk" and "blockk",
            which send only part of the elements, are refused: an element would arrive once in many steps, and larger
            than a step can use.
        error_feedback: add the residual to the next momentum.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    q_adam_optimizer: QAdamOptimizer = field(repr=False)
    hierarchical: bool = True
    _: KW_ONLY
    compression: str | Compressor = "minmax_uint8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_adam_optimizer", unwrap(self.q_adam_optimizer))
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise ValueError(
                f"QAdamAlgorithm: q_adam_optimizer must be a QAdamOptimizer, got {type(self.q_adam_optimizer).__name__}"
            )
        check_flags(self, "hierarchical", "error_feedback")
        self._check_compression()

    def _check_compression(self) -> None:
        check_codecs(self, "compression")
        if self.compression is None or isinstance(self.compression, Identity):
            raise ValueError(
                f"QAdamAlgorithm: compression must not be full precision, got {self.compression!r}; use the equivalent "
                "GradientAllReduceAlgorithm with Adam"
            )
        is_one_bit = isinstance(self.compression, Sign1Bit) or self.compression == "sign1bit"
        if needs_feedback(self.compression) and not is_one_bit:
            raise ValueError(
                "QAdamAlgorithm: compression must not be a codec that sends only part of the elements, because QAdam's "
                f"step bound would clip most of the value that a residual accumulates over many steps; got "
                f"{self.compression!r}"
            )
        if is_one_bit and not self.error_feedback:
            raise ValueError(
                f"QAdamAlgorithm: compression {self.compression!r} needs error_feedback=True, because training fails "
                "if the large residuals of one bit are lost"
            )

    @classmethod
    def for_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer], **arguments: Any) -> "QAdamAlgorithm":
        """Return the algorithm for the QAdamOptimizer in `optimizers`. Raises ValueError unless exactly one exists."""
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(own) != 1:
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(
                f"QAdamAlgorithm: attach by name needs exactly one QAdamOptimizer, got {names}; create the "
                "optimizer as torchbagua.QAdamOptimizer, or convert an Adam with QAdamOptimizer.wrap(optimizer)"
            )
        return cls(own[0], **arguments)

    def arguments(self) -> dict[str, str]:
        """Return the arguments, and the optimizer's options and progress, which must be equal on all ranks."""
        options = ("warmup_steps", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
        groups = [[group[option] for option in options] for group in self.q_adam_optimizer.param_groups]
        return {
            **super().arguments(),
            f"q_adam_optimizer ({', '.join(options)} of its groups)": repr(groups),
            "q_adam_optimizer (updates of its parameters so far)": repr(self.q_adam_optimizer.num_updates),
        }

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `error_feedback` and, if it is True, the name of the codec if it has one, since blocks may differ."""
        if not self.error_feedback:
            return {"error_feedback": False}
        codec = self.compression
        if isinstance(codec, Compressor):
            text = stable_repr(codec, "QAdamAlgorithm: compression")
            codec = next((name for name, make in REGISTRY.items() if make is type(codec)), text)
        return {"error_feedback": True, "compression": codec}

    def own_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.q_adam_optimizer]

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self.q_adam_optimizer not in optimizers:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer must be the attached optimizer, got another optimizer")

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the optimizer's parameters that are sent in full precision even after their warm-up."""
        own, codec = {id(parameter) for parameter in self.q_adam_optimizer.parameters}, self.make_codec()
        return {
            name: parameter
            for name, parameter in parameters.items()
            if id(parameter) in own and not encodes_momentum(codec, parameter)
        }

    def make_impl(self, runner: GradientRunner) -> "QAdamAlgorithmImpl":
        return QAdamAlgorithmImpl(runner)


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See `QAdamAlgorithm`."""

    algorithm: QAdamAlgorithm
    runner: GradientRunner

    def __init__(self, runner: GradientRunner) -> None:
        super().__init__(runner)
        self._q_adam = optimizer = self.algorithm.q_adam_optimizer
        self._past_warmup: list[int] = []
        self._agreement = WarmupAgreement(self.runner, optimizer)
        runner.require_grad_scaler()  # gradients contain the loss scale, momenta do not
        residuals = None
        if self.algorithm.error_feedback:
            residuals = runner.keep(residual_state("QAdamAlgorithm"), lambda: optimizer.parameters)
        self._momenta = MomentumMean(self.runner, optimizer, residuals, hierarchical=self.algorithm.hierarchical)
        optimizer.attach_averager(self)
        runner.on_close(lambda: optimizer.detach_averager(self))

    def need_reset(self) -> bool:
        """Return whether the set of parameters past their warm-up has changed since the last backward.

        The ranks also compare the progress of these parameters.
        """
        num_updates = self._q_adam.num_updates_past_warmup
        before, self._past_warmup = self._past_warmup, list(num_updates)
        if self.runner.process_group.size > 1:
            self._agreement.compare(parameters_of(self._q_adam)[0].device)
        return before != self._past_warmup

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean of gradients or of momenta. If a bucket contains both, append two separate means."""
        past = [tensor for tensor in bucket.tensors if self._sends_momentum(tensor.parameter)]
        if not past or self.runner.process_group.size == 1:  # the mean of a single gradient is bitwise that gradient
            bucket.append_centralized_synchronous_op(hierarchical=self.algorithm.hierarchical)
        elif len(past) == len(bucket.tensors) and bucket.flat.dtype == torch.float32:
            self._momenta.append(bucket)
        else:
            uncompressed = [tensor for tensor in bucket.tensors if tensor not in past]
            # Momenta are always float32: (mean - b1 m) / (1 - b1) would magnify the rounding of a shorter format.
            parts = [sub_bucket_of(bucket, past, torch.float32)]
            if uncompressed:
                parts.append(sub_bucket_of(bucket, uncompressed, bucket.flat.dtype))
            for part in parts:
                self.init_operations(None, part)
            append_sub_buckets(bucket, parts)

    def _sends_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether the momentum is sent. In full precision, the gradient is sent, which is equivalent."""
        return self._q_adam.is_past_warmup(parameter) and encodes_momentum(self.runner.codec, parameter)


def encodes_momentum(codec: Compressor, parameter: torch.Tensor) -> bool:
    """Return whether `codec` encodes the momentum of `parameter`. False for float64, since momenta are float32."""
    return parameter.dtype in ELEMENT_TYPES and codec.encodes(parameter.dtype)


register("qadam", QAdamAlgorithm, "Adam, with momentum averaged in 8 bits or one bit after a warm-up")
