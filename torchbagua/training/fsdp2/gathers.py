"""Replaces FSDP's all-gathers of weights: compressed with a codec, or in full precision over torchbagua's connections.

FSDP's own collectives between CPUs run on the user's group with the timeout of `init_process_group`, and their errors
do not name a rank; attach's timeout bounds those here. On GPUs torch's all-gather stays, unless weights are quantized:
the backend runs it in stream order, and its watchdog bounds it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_gather, fsdp_gathered_dtypes, fsdp_shard_group
from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.row_gather import RowGather
from torchbagua.runtime.lane import Job, Lane
from torchbagua.training.fsdp2.comm_runner import FirstFailure, FsdpCollective, FsdpCommRunner
from torchbagua.training.fsdp2.parts import CommunicatingPart


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
