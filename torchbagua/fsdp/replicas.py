"""Replicas of shards (HSDP), between which gradients are averaged: by a hook, or by a backend of torch.distributed.

If several one-dimensional meshes train copies of a module, `attach` installs `ReplicaMean`, the hook that FSDP calls
after its reduce-scatter. A mesh on which FSDP itself has replicas needs `register_backend`: FSDP then calls the
all-reduce of a `ReplicaGroup`, and `align_blocks` tells the group which parameters it averages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua._torch import add_backends
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm, bind
from torchbagua.codecs.base import MeanCodecs, TensorSpec
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.mean import Mean, centralized_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.fsdp._torch import (
    COLLECTIVES_WITH_GIL,
    fsdp_all_reduces,
    fsdp_divide_factor,
    fsdp_reduce_scatter,
    fsdp_replicate_group,
    fsdp_shards,
    work_of,
)
from torchbagua.fsdp.collectives import shard_codecs
from torchbagua.fsdp.comm_runner import FsdpCommRunner
from torchbagua.fsdp.parts import CommunicatingPart, Row, check_parameters_inside, communicating_parts
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.parameters import local_shard, reshard, sharded_parts
from torchbagua.runtime.runner import Runner
from torchbagua.transport.communicator import default_backends
from torchbagua.transport.streams import keep_for_current_stream


@contextmanager
def open_replicas(
    runner: Runner, group: dist.ProcessGroup, rank_invariants: Mapping[str, Any]
) -> Iterator[BaguaProcessGroup]:
    """Open private groups of the ranks that hold the same shards, for as long as the context lasts. Collective."""
    own = runner.process_group
    places = {"the rank that holds a shard, of those of its module": f"{own.rank} of {own.size}"}
    replicas = BaguaProcessGroup(
        group, timeout=own.timeout, transport=own.transport, rank_invariants={**rank_invariants, **places}
    )
    try:
        replicas.open()
        replicas.report_to(own.tracer, "replicas")
        replicas.private.check_operations(torch.device("cpu"), runner.name)  # with GPUs too, since shards are broadcast
        yield replicas
    finally:
        if runner.ends_in_order and not runner.lane.has_failed:
            replicas.private.end_in_order()
        replicas.close()


def share_shards(replicas: BaguaProcessGroup, module: torch.nn.Module) -> None:
    """Give all replicas the parameters and buffers of the first, which fully_shard does not do. Collective."""
    broadcast_tensors(replicas.world, map(local_shard, (*module.parameters(), *module.buffers())), "the shards")


def install_replica_means(
    undo: ExitStack,
    runner: FsdpCommRunner,
    replicas: BaguaProcessGroup,
    parts: Sequence[CommunicatingPart],
    codecs: MeanCodecs,
) -> SameRows:
    """Average the gradients of all parts over the replicas until `undo` is closed. Collective on GPUs."""
    for device in dict.fromkeys(part.param_group.device for part in parts):
        if device.type != "cpu":
            replicas.private.use_device(device)
            replicas.private.check_operations(device, runner.algorithm_runner.name)
    same_rows = runner.compare_rows(replicas, parts)
    for part in parts:
        mean = ReplicaMean(runner, replicas, part, codecs, same_rows)
        undo.callback(part.part.set_all_reduce_hook, None)
        undo.callback(mean.close)
        part.part.set_all_reduce_hook(mean)
    return same_rows


def mean_of_rows(group: BaguaProcessGroup, codecs: MeanCodecs, row: TensorSpec, *, average: bool) -> Mean:
    """Return the function that replaces a row by its mean over `group`, or by its sum without `average`."""
    codecs = codecs.for_dtype(row.dtype)
    hierarchical, intra = codecs.hierarchical, codecs.intra_codec
    return centralized_mean(
        group, codecs.codec, row, hierarchical=hierarchical, average=average, intra_compressor=intra
    )


class ReplicaMean:
    """The all-reduce hook of one FSDP parameter group: averages the reduce-scattered gradients over the replicas.

    FSDP also calls the hook with `set_requires_all_reduce(False)`, and adds the hook's output to the gradient. The hook
    then stores its input for the next mean, and returns zeros. If the loop discards the gradients with `zero_grad()`,
    the hook discards its stored input too.
    """

    def __init__(
        self,
        runner: FsdpCommRunner,
        replicas: BaguaProcessGroup,
        part: CommunicatingPart,
        codecs: MeanCodecs,
        same_rows: SameRows,
    ) -> None:
        self._runner = runner
        self._replicas = replicas
        self._part = part
        self._same_rows = same_rows
        self._mean_of = cache(partial(mean_of_rows, replicas, codecs))
        self._stored: tuple[Row, torch.Tensor] | None = None

    def __call__(self, gradient_L: torch.Tensor) -> None:
        """Replace the local shard of the gradient by its mean over the replicas, on the current stream.

        If the part has a gradient divide factor, it is replaced by the sum, since FSDP divides by that factor.
        """
        # Up to torch 2.14 nothing keeps this tensor alive until this stream is done with it. If FSDP casts it
        # afterwards, the next layer's reduce-scatter, on another stream, could get its memory.
        keep_for_current_stream(gradient_L)
        row = self._part.row(gradient_L.numel())
        stored, self._stored = self._stored, None
        if all(parameter.grad is None for parameter, _ in fsdp_shards(self._part.param_group)):
            stored = None
        if stored is not None and stored[0] != row:
            raise RuntimeError(
                f"torchbagua: {self._part.name}: with set_requires_all_reduce(False) every backward must reach the "
                f"same parameters, got {', '.join(row.parameter_names)} after {', '.join(stored[0].parameter_names)}; "
                "call set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
            )
        if not fsdp_all_reduces(self._part.param_group):
            self._stored = row, gradient_L.clone() if stored is None else stored[1].add_(gradient_L)
            gradient_L.zero_()
            return
        if stored is not None:
            gradient_L.add_(stored[1])
            stored = None  # frees its memory before the mean is computed
        average = fsdp_divide_factor(self._part.param_group) is None
        mean = self._mean_of(row.spec(gradient_L, self._part.name), average=average)
        reduce_row = partial(self._same_rows.reduce, self._part, row, mean, gradient_L)
        self._runner.run(self._replicas, self._part.name, gradient_L, reduce_row)

    def close(self) -> None:
        """Discard gradients that were stored but never averaged, with a warning, since they are in no gradient."""
        if self._stored is not None:
            self._stored = None
            warn_user(
                f"torchbagua: {self._part.name}: the gradients accumulated with set_requires_all_reduce(False) are "
                "lost: detach was called before a backward that averages them"
            )


def register_backend(algorithm: Algorithm, *, name: str = "torchbagua") -> None:
    """Register a torch.distributed backend whose groups average gradients with an algorithm, for the replicas of HSDP.

    Use it for a mesh on which FSDP itself has replicas: with `fully_shard` on two dimensions, or with `replicate`:

        torchbagua.fsdp.register_backend(tb.ByteGradAlgorithm())
        mesh = init_device_mesh(
            "cuda", (2, 8), mesh_dim_names=("replicas", "shards"), backend_override={"replicas": "torchbagua"}
        )
        fully_shard(model, mesh=mesh)
        torchbagua.fsdp.align_blocks(model)

    A group of this backend compresses each all-reduce, sum or mean, of a flat floating-point tensor, including your own
    all-reduces. Metrics stay exact if they are tensors without dimensions, or are reduced over another group. Torch's
    own backends run all other operations, such as the reduce-scatter. Register on all ranks, before the mesh is
    created.

    Args:
        algorithm: a gradient algorithm that supports sharded modules, with `average=True` and without error feedback.
            FSDP determines whether it needs the sum or the mean. `hierarchical` refers to the nodes of the replicas.
        name: the backend's name in `backend_override`. It must not be taken in this process.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"register_backend: algorithm must be an Algorithm, got {algorithm!r}")
    codecs = shard_codecs("register_backend", algorithm)
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"register_backend: name must be a lower-case identifier, got {name!r}")
    if name in dist.Backend.backend_list:
        raise ValueError(f"register_backend: name {name!r} is taken; use another name, also in backend_override")
    dist.Backend.register_backend(name, partial(ReplicaGroup, algorithm, codecs), devices=["cpu", "cuda"])


def align_blocks(module: torch.nn.Module) -> None:
    """Align blocks with parameters in a module's all-reduces over groups of `register_backend`.

    Call it after fully_shard or replicate. Without it a group does not know the parameters: they share blocks, small
    values lose precision, and a RuntimeWarning reports it. It installs a reduce-scatter, which calls the previous one.
    Call it on all ranks.

    Raises:
        ValueError: no part of the module has replicas over a group of such a backend.
    """
    compared: dict[ReplicaGroup, SameRows] = {}
    parts = sharded_parts(module)
    reshard(parts.values())  # an evaluation may have left the full parameters in the module
    communicating = communicating_parts(module, parts)
    check_parameters_inside(module, communicating)
    for part in communicating:
        group = fsdp_replicate_group(part.param_group)
        if isinstance(group, ReplicaGroup):
            if group not in compared:
                compared[group] = group.compare_rows(communicating)
            comm = fsdp_reduce_scatter(part.param_group)[0]
            part.part.set_custom_reduce_scatter(Announcer(comm, part, group, compared[group]))
            part.watch_gradients()
    if not compared:
        raise ValueError(
            "align_blocks: no part of the module has replicas over a group of register_backend; create the mesh with "
            "backend_override, and call fully_shard or replicate first"
        )


class ReplicaGroup(dist.ProcessGroup):
    """A group of ranks that hold the same shards. It compresses sums and means of flat floating-point tensors.

    Torch's own backends run all other operations. FSDP calls the all-reduce in `foreach_reduce`, where only the group
    can be replaced. The constructor is collective.
    """

    def __init__(
        self, algorithm: Algorithm, codecs: MeanCodecs, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor that Python may override
        backends = default_backends(store, rank, size, timeout)
        # The algorithm gets a separate group, since this group's all-reduce would call the algorithm again.
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            add_backends(group, backends)
        self._runner = FsdpCommRunner(bind(algorithm, self._inner, (), (), timeout))
        self._mean_of = cache(partial(mean_of_rows, self._runner.group, codecs))
        self._announced: tuple[CommunicatingPart, SameRows] | None = None
        self._has_warned = False

    def compare_rows(self, parts: Sequence[CommunicatingPart]) -> SameRows:
        """Return the comparison of rows for a module with these parts. Collective on GPUs."""
        return self._runner.compare_rows(self._runner.group, parts)

    def announce(self, part: CommunicatingPart, same_rows: SameRows) -> None:
        """Record that the gradients of `part` are all-reduced next, and compared by `same_rows`."""
        self._announced = part, same_rows

    def allreduce(self, *arguments: Any, **named: Any) -> Any:
        """Replace the tensors by their sum or mean over the ranks, and return a torch Work."""
        if not is_compressed(*arguments, **named):
            return self._inner.allreduce(*arguments, **named)
        (x_L,), options = arguments
        self._runner.algorithm_runner.use_device(x_L.device)
        average = options.reduceOp == dist.ReduceOp.AVG
        if self._announced is not None:
            (part, same_rows), self._announced = self._announced, None
            row = part.row(x_L.numel())
            name, mean = part.name, self._mean_of(row.spec(x_L, part.name), average=average)
            reduce_row = partial(same_rows.reduce, part, row, mean, x_L)
        else:
            name = "an all-reduce"
            mean = self._mean_of(TensorSpec((x_L.numel(),), x_L.dtype, x_L.device, name), average=average)
            reduce_row = partial(mean, x_L)
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"torchbagua: an all-reduce of {x_L.numel():,} elements is compressed in blocks that are not "
                    "aligned with parameters. If FSDP called it, call torchbagua.fsdp.align_blocks(module) after "
                    "fully_shard. If your code called it, use another group to get an exact result"
                )
        self._runner.run(self._runner.group, name, x_L, reduce_row)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=None if x_L.is_cpu else [x_L.device])
        future.set_result([x_L])
        return work_of(future)

    def shutdown(self) -> None:
        """Close the private groups; `destroy_process_group` calls it, on all ranks."""
        self._runner.algorithm_runner.close(in_order=True)
        super().shutdown()


def _inner_collective(name: str) -> Callable[..., Any]:
    def start(group: ReplicaGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(group._inner, name)(*arguments, **named)

    return start


for _name in {*COLLECTIVES_WITH_GIL} - {*vars(ReplicaGroup)}:
    setattr(ReplicaGroup, _name, _inner_collective(_name))


def is_compressed(tensors: Any, options: Any = None, **named: Any) -> bool:
    """Return whether an all-reduce with these arguments is the sum or the mean of one flat floating-point tensor."""
    if named or not isinstance(options, dist.AllreduceOptions) or not isinstance(tensors, list) or len(tensors) != 1:
        return False
    (x,) = tensors
    is_flat = x.layout is torch.strided and x.dim() == 1 and x.is_contiguous() and x.is_floating_point()
    operation: Any = options.reduceOp
    return is_flat and (operation == dist.ReduceOp.SUM or operation == dist.ReduceOp.AVG)


class Announcer:
    """Wraps a part's reduce-scatter to announce the part to the group of its replicas before the all-reduce.

    It announces the part when memory is allocated, since FSDP does not call the reduce-scatter with only one shard.
    """

    def __init__(self, comm: Any, part: CommunicatingPart, group: ReplicaGroup, same_rows: SameRows) -> None:
        self._comm = comm
        self._part = part
        self._group = group
        self._same_rows = same_rows

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output."""
        if fsdp_all_reduces(self._part.param_group):
            self._group.announce(self._part, self._same_rows)
        memory: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, **arguments: Any) -> Any:
        """Reduce-scatter; FSDP passes the arguments by name."""
        return self._comm(**arguments)
