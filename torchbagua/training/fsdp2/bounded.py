"""Replaces FSDP's all-gathers and reduce-scatters between CPUs, so that attach's timeout bounds them.

FSDP's own collectives run on the user's group with the timeout of `init_process_group`, and their errors do not name a
rank. On GPUs torch's collectives stay: the backend runs them in stream order, and its watchdog bounds them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import fsdp_all_gather, fsdp_reduce_scatter, fsdp_shard_group
from torchbagua._warnings import warn_user
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.torch_reduce_scatter import torch_reduce_scatter
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.runner import Runner
from torchbagua.training.fsdp2.comm_runner import FirstFailure
from torchbagua.training.fsdp2.rows import CommunicatingPart
from torchbagua.training.fsdp2.same_rows import SameRows


@contextmanager
def open_shards(runner: Runner, parts: Sequence[CommunicatingPart]) -> Iterator[BaguaProcessGroup]:
    """Create a group of the ranks that share a copy of the module, for as long as the context lasts. Collective.

    Its private groups are open only if collectives run between CPUs.
    """
    group = fsdp_shard_group(parts[0].param_group)
    assert group is not None
    shards = BaguaProcessGroup(group, timeout=runner.process_group.timeout, transport=runner.process_group.transport)
    try:
        shards.report_to(runner.tracer, "shards")
        if on_cpus(parts):
            shards.open()
            shards.private.check_operations(torch.device("cpu"), runner.name)
        yield shards
    finally:
        shards.close()


def on_cpus(parts: Iterable[CommunicatingPart]) -> list[CommunicatingPart]:
    """Return the parts that communicate between CPUs, over several ranks."""
    return [part for part in parts if part.param_group.device.type == "cpu" and _size_of(part) > 1]


def _size_of(part: CommunicatingPart) -> int:
    group = fsdp_shard_group(part.param_group)
    return 1 if group is None else group.size()


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
        comm, is_torchs = fsdp_all_gather(part.param_group)
        if is_torchs:
            undo.callback(part.part.set_custom_all_gather, comm)
            part.part.set_custom_all_gather(BoundedGather(runner, part))


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
        undo.callback(part.part.set_custom_reduce_scatter, fsdp_reduce_scatter(part.param_group)[0])
        part.part.set_custom_reduce_scatter(BoundedReduceScatter(group, failure, part, same_rows))


class GatherRunner:
    """Runs gathers in the order in which FSDP calls them, concurrently with the algorithm's lane.

    Attributes:
        group: the same.
        communicator: a separate communicator for the gathers.
    """

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


class BoundedGather:
    """The all-gather of one FSDP parameter group; implements the AllGather interface of `torch.distributed.fsdp`.

    It gathers bytes, whatever the dtypes and tensor extensions.
    """

    def __init__(self, runner: GatherRunner, part: CommunicatingPart) -> None:
        self._runner = runner
        self._part = part
        self._torchs, _ = fsdp_all_gather(part.param_group)
        self._gather_over = cache(partial(_exact_gather, runner, part))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the output."""
        with torch.inference_mode(False):  # a lane runs outside of inference mode and may not write to its tensors
            memory: torch.Tensor = self._torchs.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> GatherWork | None:
        """Fill `output_tensor`, which contains `input_tensor`, with the rows of all ranks of `group`."""
        length = input_tensor.numel()
        own_row = output_tensor[group.rank() * length :][:length]
        assert own_row.data_ptr() == input_tensor.data_ptr(), "FSDP gathers in place"
        return self._runner.run(partial(self._gather_over(group), output_tensor), async_op=async_op)


def _exact_gather(runner: GatherRunner, part: CommunicatingPart, group: dist.ProcessGroup) -> ExactGather:
    ranks: Sequence[int] = range(runner.group.size)
    if group is not fsdp_shard_group(part.param_group):
        all_ranks = dist.get_process_group_ranks(runner.group.process_group)
        ranks = [all_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
    return ExactGather(runner.communicator, ranks, runner.group.nodes, f"weights of {part.label}")


class BoundedReduceScatter:
    """The reduce-scatter of one FSDP parameter group: torch's arithmetic over torchbagua's connections."""

    def __init__(
        self, group: BaguaProcessGroup, failure: FirstFailure, part: CommunicatingPart, same_rows: SameRows
    ) -> None:
        self._communicator = group.world
        self._failure = failure
        self._part = part
        self._same_rows = same_rows
        self._torchs, _ = fsdp_reduce_scatter(part.param_group)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output."""
        memory: torch.Tensor = self._torchs.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean over the ranks of this rank's row of `input_tensor` to `output_tensor`; FSDP blocks."""
        row = self._part.row(output_tensor.numel())
        reduce_row = partial(torch_reduce_scatter, self._communicator, input_tensor, output_tensor, op, self._part.name)
        zeros = partial(self._reduce_zeros, row.num_elements, output_tensor.dtype, op)
        with self._failure.guard():
            self._same_rows.reduce(self._part, row, reduce_row, zeros)

    def _reduce_zeros(self, length: int, dtype: torch.dtype, op: Any) -> None:
        zeros = torch.zeros(self._communicator.size * length, dtype=dtype)
        torch_reduce_scatter(self._communicator, zeros, torch.empty(length, dtype=dtype), op, self._part.name)
