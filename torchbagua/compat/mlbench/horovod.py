"""mlbench's AllReduceAggregationHVD: the sum over all ranks with Horovod. Its constructor imports Horovod."""

import importlib
import os
import secrets
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup
from torchbagua.collectives import broadcast_tensors
from torchbagua.compat.mlbench.base import Call, Denominator
from torchbagua.compat.mlbench.centralized import AllReduceAggregation, divide
from torchbagua.observe import Details, ObservedTracer, Observer, Run, Tracer

_RECIPE = (
    "horovod 0.28.1 does not build with a torch newer than 2.0 without a patch: unpack its source package, write "
    "CMAKE_CXX_STANDARD 17 for 14 in CMakeLists.txt and horovod/torch/CMakeLists.txt, and install it with "
    "CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation; "
    "`make test-horovod` does this. AllReduceAggregation computes the same sums without Horovod"
)


class AllReduceAggregationHVD(AllReduceAggregation):
    """`AllReduceAggregation` with Horovod: `hvd.allreduce(op=Sum)`. It does not need torch.distributed.

    First call `hvd.init()` in a program that `horovodrun` started, or `init_from_torch` in a torchrun program. Horovod
    does not support bfloat16, so bfloat16 values are summed in float32.

    Args:
        world_size: the number of ranks, equal to `hvd.size()`.
        divide_before: see `AllReduceAggregation`.
        use_cuda: no effect, see `Aggregation`.
        observers: see `Aggregation`. For Horovod's messages, they get the bytes that a ring of the ranks would send.

    Raises:
        ImportError: Horovod is not installed; the message explains how to install it.
        RuntimeError: at each call: `hvd.init` was not called, or `hvd.size()` is not `world_size`.
        ValueError, NotImplementedError: see `AllReduceAggregation`.
    """

    def __init__(
        self,
        world_size: int,
        divide_before: bool = False,
        use_cuda: bool = False,
        *,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(world_size, divide_before, use_cuda, observers=observers)
        self._hvd = _import_horovod()
        self._own_tracer: Tracer | None = None

    @property
    def group(self) -> BaguaProcessGroup:
        """Raise RuntimeError: Horovod has no such group."""
        raise RuntimeError(f"{self._owner}: Horovod communicates, so this aggregation has no group")

    def close(self) -> None:
        """End the traces. Horovod keeps running: `hvd.shutdown` ends it."""
        if self._own_tracer is not None:
            self._own_tracer.end()

    def _aggregate(self, kind: str, model: torch.nn.Module, op: str, denom: Denominator, *, by_layer: bool) -> None:
        self._check_op(op)
        if not self._hvd.is_initialized():
            raise RuntimeError(f"{self._owner}: Horovod must be initialized: call hvd.init(), under horovodrun")
        if self._hvd.size() != self.world_size:
            raise RuntimeError(
                f"{self._owner}: world_size must be hvd.size(), which is {self._hvd.size()}, got {self.world_size}. "
                "With torchrun alone, Horovod sees only one rank: start the program with horovodrun and call "
                "hvd.init(), or call torchbagua.compat.mlbench.horovod.init_from_torch()"
            )
        super()._aggregate(kind, model, op, denom, by_layer=by_layer)

    def _reduce(self, data: torch.Tensor, *, average: bool = False) -> torch.Tensor:
        rank, size = self._rank_and_size
        if size > 1:
            wide = data.float() if data.dtype == torch.bfloat16 else data
            num_bytes = 2 * wide.nbytes * (size - 1) // size
            details = Details(
                "all_reduce", self._name, "world", tuple(range(size)), ((rank + 1) % size,),
                num_elements=data.numel(), raw_bytes=num_bytes, wire_bytes=num_bytes,
            )  # fmt: skip
            with self._tracer.span("send", details):
                wide = self._hvd.allreduce(wide, op=self._hvd.Sum)
            if average:
                divide(wide, float(size))
            data = wide.to(data.dtype)
        return data

    @property
    def _rank_and_size(self) -> tuple[int, int]:
        return self._hvd.rank(), self._hvd.size()

    @property
    def _tracer(self) -> Tracer:
        if self._own_tracer is None:
            self._own_tracer = ObservedTracer(self._observers)
            rank, size = self._rank_and_size
            number = self._largest([secrets.randbits(62)])[0]  # on all ranks, whether or not they have observers
            if self._own_tracer.is_on:
                run = Run(
                    id=f"{number:016x}", algorithm=self._owner, description=self._description, rank=rank,
                    nodes=(0,) * size, settings={}, board=None,
                )  # fmt: skip
                self._own_tracer.start(run)
        return self._own_tracer

    def _calls(self, own: Call) -> list[Call]:
        gathered = self._hvd.allgather(torch.tensor([[own.checksum, own.has_denominator, own.has_all_values]]))
        return [Call(*row) for row in gathered.tolist()]

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        own = torch.tensor([list(map(int, numbers))])
        largest: list[int] = self._hvd.allgather(own).amax(0).tolist()
        return largest

    def _use_device(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._tracer.use_gpu(device)


def init_from_torch(interface: str | None = None) -> None:
    """Initialize Horovod over gloo in a program that torchrun started. Collective over torch's default group.

    Horovod's ranks are torch's ranks. Rank 0 runs Horovod's rendezvous server until the program ends.

    Args:
        interface: the network interface that Horovod uses. By default the loopback, if all ranks are on one node.

    Raises:
        ImportError: Horovod is not installed.
        RuntimeError: there is no default process group.
        ValueError: `interface` is None with several nodes, or the ranks of a node are not consecutive.
    """
    hvd = _import_horovod()
    if dist.group.WORLD is None:
        raise RuntimeError("init_from_torch: no default process group exists; call init_process_group first")
    group = BaguaProcessGroup(dist.group.WORLD)
    try:
        nodes, rank = group.node_ranks, group.rank
        if interface is None and len(nodes) > 1:
            raise ValueError(f"init_from_torch: interface must be given with {len(nodes)} nodes, got None")
        if list(chain(*nodes)) != list(range(group.size)):
            raise ValueError(f"init_from_torch: the ranks of a node must be consecutive, got {nodes}")
        port = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
            hosts = importlib.import_module("horovod.runner.common.util.hosts")
            port.fill_(server.start())
            infos = [hosts.HostInfo(f"node{node}", len(ranks)) for node, ranks in enumerate(nodes)]
            server.init(hosts.get_host_assignments(infos, group.size))
        broadcast_tensors(group.world, [port], "the port of Horovod's rendezvous server")
        node = group.nodes[rank]
        local_rank = nodes[node].index(rank)
        peers = [ranks for ranks in nodes if len(ranks) > local_rank]
        os.environ |= {
            "HOROVOD_HOSTNAME": f"node{node}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(group.size),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_LOCAL_SIZE": str(len(nodes[node])),
            "HOROVOD_CROSS_RANK": str(peers.index(nodes[node])),
            "HOROVOD_CROSS_SIZE": str(len(peers)),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(int(port)),
            "HOROVOD_GLOO_IFACE": interface or "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        hvd.init()
    finally:
        group.close()


def _import_horovod() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ImportError(
            f"AllReduceAggregationHVD: Horovod for torch cannot be imported ({error}): {_RECIPE}"
        ) from error
