"""Replaces the collectives that FSDP calls for a parameter group: all-gathers of weights, reduce-scatters of gradients.

With a codec, they send compressed. Without one, they have torch's arithmetic over torchbagua's connections: FSDP's own
collectives between CPUs run on the user's group with the timeout of `init_process_group`, and their errors do not name
a rank; attach's timeout bounds those here. On GPUs torch's all-gather stays, unless weights are quantized: the backend
runs it in stream order, and its watchdog bounds it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.algorithms.base import Algorithm, available_algorithms, get
from torchbagua.codecs.base import Compressor, Identity, MeanCodecs, TensorSpec, needs_feedback, sum_dtype
from torchbagua.collectives.agreement import stable_repr
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.row_gather import RowGather
from torchbagua.collectives.row_mean import RowMean
from torchbagua.collectives.torch_reduce_scatter import torch_reduce_scatter
from torchbagua.fsdp._torch import (
    fsdp_all_gather,
    fsdp_all_reduce_hook,
    fsdp_gathered_dtypes,
    fsdp_reduce_scatter,
    fsdp_shard_group,
    fsdp_shards,
    has_gradient_hooks,
    premultiplier,
)
from torchbagua.fsdp.comm_runner import FirstFailure, FsdpCommRunner
from torchbagua.fsdp.parts import CommunicatingPart
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.lane import Job, Lane


class FsdpCollective:
    """Base of the collectives that replace torch's for one FSDP parameter group: allocates memory as torch's do."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output, on the current stream."""
        with torch.inference_mode(False):  # a lane runs outside of inference mode and may not write to its tensors
            return torch.empty(*size, dtype=dtype, device=device)


# Weights


def bound_gathers(
    undo: ExitStack, group: BaguaProcessGroup, failure: FirstFailure, parts: Sequence[CommunicatingPart]
) -> None:
    """Gather the weights of `parts` over the connections of `group`, until `undo` is closed. Collective.

    An all-gather that the user has set stays.
    """
    if not parts:
        return
    runner = GatherRunner(group, failure)
    undo.callback(runner.close)
    for part in parts:
        if fsdp_all_gather(part.param_group)[1]:
            _replace_all_gather(undo, part, BoundedGather(runner, part))


def quantize_gathers(
    undo: ExitStack,
    runner: FsdpCommRunner,
    parts: Sequence[CommunicatingPart],
    codec: Compressor,
    *,
    hierarchical: bool,
) -> None:
    """Gather the weights of all parts with `codec` until `undo` is closed: attach's quantize_weights."""
    for part in parts:
        undo.callback(part.part.reshard)  # after the previous gather is restored: drops the decoded weights
        _replace_all_gather(undo, part, WeightGather(runner, part, codec, hierarchical=hierarchical))


def _replace_all_gather(undo: ExitStack, part: CommunicatingPart, gather: FsdpCollective) -> None:
    undo.callback(part.part.set_custom_all_gather, fsdp_all_gather(part.param_group)[0])
    part.part.set_custom_all_gather(gather)


class GatherRunner:
    """Runs gathers in the order in which FSDP calls them, concurrently with the algorithm's lane."""

    def __init__(self, group: BaguaProcessGroup, failure: FirstFailure) -> None:
        self.group = group
        self.communicator = group.world.silent_twin()
        self._failure = failure
        self._lane = Lane("torchbagua lane of weights that are gathered ahead", on_failure=group.close)
        self._last: Job[None] | None = None

    def run(self, gather: Callable[[], None], *, async_op: bool) -> "GatherWork | None":
        """Call `gather` on this thread; or, with `async_op`, on the lane, and return a handle that waits for it."""
        if async_op:
            self._last = self._lane.submit(partial(self._guarded, gather))
            return GatherWork(self._last)
        last, self._last = self._last, None
        if last is not None:
            last.result()
        self._guarded(gather)
        return None

    def close(self) -> None:
        """Finish the gathers in flight and end the lane."""
        self._lane.close()

    def _guarded(self, gather: Callable[[], None]) -> None:
        with self._failure.guard():
            gather()


class GatherWork(dist.Work):
    """The handle of a gather in flight, which FSDP waits for."""

    def __init__(self, job: Job[None]) -> None:
        super().__init__()
        self._job = job

    def wait(self, *_: object) -> bool:
        """Wait until all weights are gathered; raises CommunicationError if they do not arrive in time."""
        self._job.result()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._job.is_done()


class BoundedGather(FsdpCollective):
    """The all-gather of one FSDP parameter group, which gathers bytes, whatever the dtypes and tensor extensions."""

    def __init__(self, runner: GatherRunner, part: CommunicatingPart) -> None:
        self._runner = runner
        self._gather_over = cache(partial(_exact_gather, runner, part))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> GatherWork | None:
        """Fill `output_tensor`, which contains `input_tensor`, with the rows of all ranks of `group`."""
        length = input_tensor.numel()
        own_row = output_tensor[group.rank() * length :][:length]
        assert own_row.data_ptr() == input_tensor.data_ptr(), "FSDP gathers in place"
        return self._runner.run(partial(self._gather_over(group), output_tensor), async_op=async_op)


def _exact_gather(runner: GatherRunner, part: CommunicatingPart, group: dist.ProcessGroup) -> ExactGather:
    own = runner.group
    ranks: Sequence[int] = range(own.size)
    if group is not fsdp_shard_group(part.param_group):
        all_ranks = dist.get_process_group_ranks(own.process_group)
        ranks = [all_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
    return ExactGather(runner.communicator, ranks, own.nodes, f"weights of {part.label}")


class WeightGather(FsdpCollective):
    """The all-gather of one FSDP parameter group, with a codec.

    Each rank encodes its shards of the parameters, which form one row. All ranks decode all rows, including their own.
    """

    def __init__(
        self, runner: FsdpCommRunner, part: CommunicatingPart, codec: Compressor, *, hierarchical: bool
    ) -> None:
        self._runner = runner
        self._part = part
        self._codec = codec
        self._name = f"weights of {part.label}"
        self._group = fsdp_shard_group(part.param_group)
        self._exact, _ = fsdp_all_gather(part.param_group)
        self._gather_of = cache(partial(RowGather, runner.group, codec, hierarchical=hierarchical))
        self._has_warned = why_in_full_precision(part, codec) is not None  # attach has warned already

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Write all ranks' `input_tensor`, encoded and decoded, to `output_tensor`, in forward and in backward.

        In stream order everything is launched on the current stream, even with `async_op`. Otherwise it returns when
        all rows are gathered.

        With `reshard_after_forward=k`, backward gathers the weights that forward has decoded over groups of k ranks.
        The previous all-gather does it, in full precision: backward's weights are bitwise equal to forward's.
        """
        dtype = input_tensor.dtype
        if group is not self._group or not self._codec.encodes(dtype):
            if group is self._group and not self._has_warned:  # attach did not see the policy that casts to this dtype
                self._has_warned = True
                with self._runner.failure.guard():  # if a filter makes it an error, other ranks do not wait
                    message = _explain_full_precision(self._name, self._codec, {dtype})
                    warn_user(message, UncompressedParametersWarning)
            return self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        row = self._part.whole_row
        assert row.num_elements == input_tensor.numel(), "FSDP gathers whole rows"
        gather = self._gather_of(row.spec(input_tensor, self._name))
        self._runner.run(self._runner.group, self._name, output_tensor, partial(gather, input_tensor, output_tensor))
        return None


def why_in_full_precision(part: CommunicatingPart, codec: Compressor) -> str | None:
    """Return the warning that weights of `part` are not compressed; None if they are."""
    dtypes = fsdp_gathered_dtypes(part.param_group)
    if len(dtypes) == 1 and all(map(codec.encodes, dtypes)):
        return None
    return _explain_full_precision(f"weights of {part.label}", codec, dtypes)


def _explain_full_precision(name: str, codec: Compressor, dtypes: set[torch.dtype]) -> str:
    kinds = " and ".join(sorted(map(str, dtypes)))
    why = f"{codec} does not encode {kinds}"
    if len(dtypes) > 1 or dtypes == {torch.uint8}:
        why = "FSDP gathers parameters of several dtypes as bytes; set MixedPrecisionPolicy's param_dtype"
    return f"torchbagua: {name} are gathered in full precision, because {why}"


# Gradients


def shard_codecs(caller: str, algorithm: Algorithm) -> MeanCodecs:
    """Return the codecs with which `algorithm` sends the gradients of sharded modules."""
    name = type(algorithm).__name__
    try:
        codecs = algorithm.make_shard_codecs()
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from error
    if codecs is None:
        raise ValueError(
            f"{caller}: {name} does not support modules on which fully_shard was called; "
            f"{' and '.join(algorithms_of_shards())} do"
        )
    if not isinstance(codecs, MeanCodecs):
        raise TypeError(
            f"{name}.make_shard_codecs must return a torchbagua.codecs.MeanCodecs, or None if the algorithm does not "
            f"support sharded modules, got {codecs!r}"
        )
    owner = f"{name}: the codec"
    compared = algorithm.make_codec()  # ranks compare it, and attach warns of dtypes that it does not encode
    if stable_repr(codecs.codec, owner) != stable_repr(compared, owner):
        raise TypeError(
            f"{name}.make_shard_codecs sends with {codecs.codec}, but make_codec returns {compared}; have both return "
            "the same codec"
        )
    for codec in (codecs.codec, codecs.intra_codec):
        if needs_feedback(codec):
            raise ValueError(
                f"{caller}: {name}.make_shard_codecs must not return a codec that needs error feedback, since sharded "
                f"modules have none; got {codec!r}"
            )
    return codecs


def algorithms_of_shards() -> list[str]:
    """Return the names of the registered gradient algorithms that support sharded modules."""
    default = Algorithm.make_shard_codecs
    constructors = [get(name) for name in available_algorithms()]
    return sorted({cls.__name__ for cls in constructors if getattr(cls, "make_shard_codecs", default) is not default})


def install_reduce_scatters(
    undo: ExitStack,
    runner: FsdpCommRunner,
    parts: Sequence[CommunicatingPart],
    codecs: MeanCodecs,
    same_rows: SameRows,
) -> None:
    """Reduce-scatter the gradients of all parts with `codecs` until `undo` is closed, which restores torch's.

    With replicas, a hierarchical mean treats the ranks of one shard group like the ranks of a node, if they are on one
    node. If it does not compress within nodes, torch's reduce-scatter stays.
    """
    has_replicas = runner.replicas is not None and runner.replicas.size > 1
    if has_replicas and codecs.intra_codec is not None and len(runner.group.node_ranks) == 1:
        if isinstance(codecs.intra_codec, Identity):
            return
        codecs = MeanCodecs(codecs.intra_codec)
    for part in parts:
        _replace_reduce_scatter(undo, part, RowScatter(runner, part, codecs, same_rows))


def bound_reduce_scatters(
    undo: ExitStack,
    group: BaguaProcessGroup,
    failure: FirstFailure,
    parts: Sequence[CommunicatingPart],
    same_rows: SameRows,
) -> None:
    """Reduce-scatter the gradients of `parts` over the connections of `group`, until `undo` is closed.

    A reduce-scatter that the user has set stays. Torch's reduce-scatter stays too, with a warning, if the transport of
    `group` has no torch group.
    """
    torchs = [part for part in parts if fsdp_reduce_scatter(part.param_group)[1]]
    if torchs and not group.world.has_torch_group:
        warn_user(
            f"torchbagua: FSDP itself reduce-scatters gradients, since the transport of the {group.world.scope} group "
            f"has no torch group: timeout={group.timeout} does not bound these waits, but the timeout of "
            "init_process_group does. Pass this timeout to init_process_group"
        )
        return
    for part in torchs:
        _replace_reduce_scatter(undo, part, BoundedReduceScatter(group, failure, part, same_rows))


def _replace_reduce_scatter(undo: ExitStack, part: CommunicatingPart, scatter: FsdpCollective) -> None:
    undo.callback(part.part.set_custom_reduce_scatter, fsdp_reduce_scatter(part.param_group)[0])
    part.part.set_custom_reduce_scatter(scatter)


class RowScatter(FsdpCollective):
    """The reduce-scatter of one FSDP parameter group, with the algorithm's codecs."""

    def __init__(
        self, runner: FsdpCommRunner, part: CommunicatingPart, codecs: MeanCodecs, same_rows: SameRows
    ) -> None:
        self._runner = runner
        self._part = part
        self._same_rows = same_rows
        self._mean_of = cache(partial(_row_mean, runner.group, codecs))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean over the ranks of this rank's row of `input_tensor` to `output_tensor`, in backward.

        In stream order everything is launched on the current stream. Otherwise it returns when the row has been
        reduced; on CPUs it returns at once if the row is read only after backward.
        """
        row = self._part.row(output_tensor.numel())
        mean = self._mean_of(row.spec(input_tensor, self._part.name), self._divisor(op))
        dtype = sum_dtype(output_tensor.dtype)

        def scatter(x_N: torch.Tensor, out_L: torch.Tensor) -> None:
            sums_L = out_L if out_L.dtype == dtype else torch.empty_like(out_L, dtype=dtype)
            mean(x_N, sums_L)
            if sums_L is not out_L:
                out_L.copy_(sums_L)

        reduce = partial(self._same_rows.reduce, self._part, row, scatter, input_tensor, output_tensor)
        until_end = self._is_read_at_end(output_tensor, op)
        self._runner.run(self._runner.group, self._part.name, input_tensor, reduce, until_end=until_end)

    def _is_read_at_end(self, out_L: torch.Tensor, op: Any) -> bool:
        """Return whether FSDP reads the local row only after backward, when it creates views of it as gradients.

        In all other cases FSDP divides or casts the row, adds it to gradients, or passes it to a hook, or a parameter's
        hook may read it.
        """
        if not out_L.is_cpu or op == dist.ReduceOp.SUM or fsdp_all_reduce_hook(self._part.param_group) is not None:
            return False
        return all(
            parameter.dtype == out_L.dtype and parameter.grad is None and not has_gradient_hooks(parameter)
            for parameter, _ in fsdp_shards(self._part.param_group)
        )

    def _divisor(self, op: Any) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return float(self._runner.group.size)
        if (factor := premultiplier(op)) is not None:
            return 1.0 / factor
        raise ValueError(f"torchbagua: FSDP's reduce-scatter must be AVG, SUM or PREMUL_SUM, got {op}")


def _row_mean(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, divisor: float) -> RowMean:
    codecs = codecs.for_dtype(row.dtype)
    return RowMean(group, codecs.codec, row, divisor=divisor, intra_compressor=codecs.intra_codec)


class BoundedReduceScatter(FsdpCollective):
    """The reduce-scatter of one FSDP parameter group: torch's arithmetic over torchbagua's connections."""

    def __init__(
        self, group: BaguaProcessGroup, failure: FirstFailure, part: CommunicatingPart, same_rows: SameRows
    ) -> None:
        self._communicator = group.world
        self._failure = failure
        self._part = part
        self._same_rows = same_rows

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean over the ranks of this rank's row of `input_tensor` to `output_tensor`; FSDP blocks."""
        row = self._part.row(output_tensor.numel())
        scatter = partial(torch_reduce_scatter, self._communicator, op=op, name=self._part.name)
        with self._failure.guard():
            self._same_rows.reduce(self._part, row, scatter, input_tensor, output_tensor)
