"""Train over TorchBackendTransport on one rank, and compare with the default transport; started by torchrun.

Arguments: the names of the cases.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from rank_cases import run_cases
from torchbagua.testing.transports import check_member
from torchbagua.transport.base import Members, TransportMaker
from torchbagua.transport.torch_backend import TorchBackendTransport

NUM_STEPS = 4
TIMEOUT = timedelta(seconds=30)

ALGORITHMS: dict[str, Callable[[], tb.Algorithm]] = {
    "gradient_allreduce": tb.GradientAllReduceAlgorithm,
    "compressed_allreduce": tb.CompressedAllReduceAlgorithm,
    "bytegrad": tb.ByteGradAlgorithm,
    "powersgd": partial(tb.PowerSGDAlgorithm, start_step=1),
    "topk": partial(tb.TopKAlgorithm, ratio=0.1),
    "decentralized": partial(tb.DecentralizedAlgorithm, peer_selection_mode=tb.topology.Ring()),
    "low_precision_decentralized": tb.LowPrecisionDecentralizedAlgorithm,
    "diloco": partial(tb.DiLoCoAlgorithm, 2),
    "local_sgd": partial(tb.algorithms.LocalSGDAlgorithm, 2),
    "streaming_diloco": partial(tb.DiLoCoAlgorithm, 4, fragments=2, delay=1),
}


class GlooWork(dist.Work):
    """The work of a backend whose wait takes no timeout."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> bool:
        return self._work.wait()


class OtherBackend(dist.ProcessGroup):
    """gloo under another name, as a Python backend: it has the operations that torchbagua calls, except `lacking`."""

    lacking: frozenset[str] = frozenset()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "other"

    def _start(self, operation: str, *arguments: Any) -> GlooWork:
        if operation in self.lacking:
            raise NotImplementedError(f"there is no {operation}")
        return GlooWork(getattr(self._gloo, operation)(*arguments))

    send, recv = partialmethod(_start, "send"), partialmethod(_start, "recv")
    allreduce = partialmethod(_start, "allreduce")
    # With the names of these operations since torch 2.13.
    alltoall_base = all_to_all_single = partialmethod(_start, "alltoall_base")
    _allgather_base = all_gather_single = partialmethod(_start, "_allgather_base")


class Model(nn.Sequential):
    """A few layers, one with several blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(10, 301), nn.Tanh(), nn.Linear(301, 47), nn.Tanh(), nn.Linear(47, 1))


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    name: str,
    transport: TransportMaker | None,
    nodes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    own_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Train with SGD and DDP over `group`, with an algorithm over `own_group`, and return the weights."""
    assert dist.group.WORLD is not None
    group = group or dist.group.WORLD
    ddp = DistributedDataParallel(Model(), process_group=group)
    data = torch.Generator().manual_seed(dist.get_rank())
    optimizer: torch.optim.Optimizer
    if name == "qadam":
        optimizer = tb.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=1)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    algorithm = "qadam" if name == "qadam" else ALGORITHMS[name]()
    own = tb.BaguaProcessGroup(own_group or group, nodes=nodes, timeout=TIMEOUT, transport=transport)
    with tb.attach(ddp, optimizer, algorithm, process_group=own):
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(6, 10, generator=data)).square().mean().backward()
            optimizer.step()
    return weights_of(ddp)


def check_same_weights(*arguments: Any, transport: TransportMaker = TorchBackendTransport, **options: Any) -> None:
    """Train over the default transport and over `transport`, and check that the weights are bitwise equal."""
    expected = train(*arguments, None, **{**options, "own_group": None})
    found = train(*arguments, transport, **options)
    assert torch.equal(found, expected), (arguments, (found - expected).abs().max())


@contextmanager
def expect_one_deadline_warning() -> Iterator[None]:
    """Check that the only warning reports that the backend does not bound its waits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    assert len(messages) == 1, messages
    assert "backend other does not bound its waits by timeout=0:00:30" in messages[0]


def suite() -> None:
    """The transport passes the public test suite over gloo, and over the other backend, which bounds no waits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    all_ranks = tuple(range(size))
    for index, group in enumerate((dist.group.WORLD, dist.new_group(backend="other"))):
        assert group is not None
        for has_messages in (True, False):
            store = dist.PrefixStore(f"suite {index} {has_messages}", dist.group.WORLD.get_group_store())
            members = Members(group, all_ranks, rank, store, TIMEOUT, all_ranks)
            checks = check_member(partial(TorchBackendTransport, has_messages=has_messages), members)
            assert ("deadline_of_collectives" in checks) == (index == 0), checks
            assert {"all_gather", "all_reduce", "all_to_all", "all_to_all_single"} <= set(checks), checks


def collectives_alone() -> None:
    """As on an accelerator, each exchange is one collective. On two ranks, gloo sums in rank order."""
    assert {*ALGORITHMS, "qadam", "async"} == set(tb.algorithms.base._REGISTRY)
    collective = partial(TorchBackendTransport, has_messages=False)
    for name in ("bytegrad", "compressed_allreduce"):
        check_same_weights(name, transport=collective, nodes=[0, 0, 1, 1])
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]  # ranks have other numbers in the job
    for name in [*ALGORITHMS, "qadam"]:
        check_same_weights(name, transport=collective, group=halves[dist.get_rank() // 2])


def messages() -> None:
    """The default of a TorchBackendTransport."""
    for name in [*ALGORITHMS, "qadam"]:
        check_same_weights(name, nodes=[0, 0, 1, 1])
    # Ranks are in different numbers of groups: if torch numbered the groups, ranks would not find each other.
    for _ in range(3):
        check_same_weights("bytegrad", nodes=[0, 0, 0, 1])


def other_backend() -> None:
    """A group of another backend gets this transport by default."""
    group = dist.new_group(backend="other")
    for name in ("bytegrad", "low_precision_decentralized", "streaming_diloco"):
        with expect_one_deadline_warning():
            found = train(name, None, own_group=group)
        assert torch.equal(found, train(name, None))
    check_same_weights("topk", transport=partial(TorchBackendTransport, has_messages=False), own_group=group)


def refused() -> None:
    """A missing operation raises on all ranks, even if only some ranks lack it."""
    group = dist.new_group(backend="other")
    collective = partial(TorchBackendTransport, has_messages=False)
    all_ranks = range(dist.get_world_size())
    for transport, lacking, operation, ranks in (
        (None, "send", "isend", all_ranks),
        (None, "recv", "irecv", [1]),
        (collective, "alltoall_base", "all_to_all_single", all_ranks),
        (collective, "_allgather_base", "all_gather_into_tensor", [0]),
        (collective, "allreduce", "all_reduce", [1, 2]),
    ):
        OtherBackend.lacking = frozenset({lacking} if dist.get_rank() in ranks else ())
        expected = (
            rf"torchbagua: backend other has no {operation}, which ByteGradAlgorithm needs for tensors on cpu: "
            f"there is no {lacking}"
        )
        with expect_one_deadline_warning(), pytest.raises(ValueError, match=expected):
            train("bytegrad", transport, own_group=group)
    OtherBackend.lacking = frozenset()
    by_hand = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(
        ValueError, match=r"process_group must be a group that .* returned, got a manually constructed group"
    ):
        tb.BaguaProcessGroup(by_hand, transport=TorchBackendTransport)
    train("bytegrad", None, own_group=group)  # the failed attempts leave nothing behind


CASES = {case.__name__: case for case in (messages, suite, collectives_alone, other_backend, refused)}


def main() -> None:
    dist.Backend.register_backend("other", OtherBackend, devices=["cpu"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    run_cases(sys.argv[1:], lambda name: CASES[name]())


if __name__ == "__main__":
    main()
