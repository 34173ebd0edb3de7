"""Algorithms over a transport as a user writes it, from docs/extend/transport.md."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Normed, Weights, assert_same_weights, weights_of
from ranks import run_ranks
from torchbagua.algorithms.base import init_for
from torchbagua.transport import TransportError, TransportMaker
from torchbagua.transport.gloo import GlooTransport
from training import build
from transports import QueueTransport

NUM_STEPS = 3
MODEL = build(Normed)
# With these arguments, all of them communicate within NUM_STEPS.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "powersgd": {"start_step": 1},
    "async": {"warmup_steps": NUM_STEPS},
    "diloco": {"inner_steps": 2},
    "streaming_diloco": {"inner_steps": 2, "fragments": 2, "delay": 0},
}
# One of each way to communicate.
NAMES = ["gradient_allreduce", "qadam", "powersgd", "low_precision_decentralized", "async", "streaming_diloco"]


def train(
    group: dist.ProcessGroup,
    name: str,
    transport: TransportMaker | None,
    nodes: Sequence[int] | None = None,
    **arguments: Any,
) -> list[Weights]:
    """Return the weights after each step, and after detach."""
    module = copy.deepcopy(MODEL)
    ddp = DistributedDataParallel(module, process_group=group)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = (
        tb.QAdamOptimizer(trained, lr=0.01, warmup_steps=1) if name == "qadam" else torch.optim.SGD(trained, lr=0.1)
    )
    algorithm = init_for(name, [optimizer], **{**ARGUMENTS.get(name, {}), **arguments})
    data = torch.Generator().manual_seed(1000 + group.rank())
    own, recorder, found = tb.BaguaProcessGroup(group, nodes=nodes, transport=transport), tb.observe.Recorder(), []
    with tb.attach(ddp, optimizer, algorithm, process_group=own, observers=[recorder]):
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(6, 10, generator=data)).square().sum().backward()
            optimizer.step()
            found.append(weights_of(module))
    assert recorder.bytes_sent > 0
    return [*found, weights_of(module)]


def check_same_bits(name: str, monkeypatch: pytest.MonkeyPatch, size: int, nodes: Sequence[int] | None = None) -> None:
    expected = run_ranks(size, lambda group: train(group, name, None, nodes))
    with monkeypatch.context() as patch:
        patch.setattr(GlooTransport, "__init__", lambda transport, members: pytest.fail("gloo is opened"))
        found = run_ranks(size, lambda group: train(group, name, QueueTransport, nodes))
    for rank in range(size):
        for expected_weights, found_weights in zip(expected[rank], found[rank], strict=True):
            assert_same_weights([expected_weights, found_weights])


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_is_bitwise_equal_to_the_default_transport(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_bits(name, monkeypatch, 2)


@pytest.mark.parametrize("name", ["bytegrad", "decentralized", "diloco"])
def test_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_bits(name, monkeypatch, 4, [0, 0, 1, 1])


def test_asynchronous_averages() -> None:
    """Results depend on timing, so they are only checked to be finite."""

    def body(group: dist.ProcessGroup) -> list[Weights]:
        return train(group, "async", QueueTransport, warmup_steps=0, sync_interval_ms=1)

    for weights in run_ranks(2, body):
        assert all(tensor.isfinite().all() for tensor in weights[-1].values())


class Unplugged(QueueTransport):
    """Fails on rank 0 at the third message that it waits for."""

    num_left = 5  # the bucket takes two, and the meeting of the first backward two

    def wait_receive(self, peer: int, tag: int) -> None:
        self.num_left -= 1
        if self.rank == 0 and not self.num_left:
            raise TransportError("the cable is unplugged", peer)
        super().wait_receive(peer, tag)


def test_an_error_names_ranks_operation_and_bucket() -> None:
    def body(group: dist.ProcessGroup) -> str:
        with pytest.raises(tb.CommunicationError) as raised:
            train(group, "bytegrad", Unplugged)
        return str(raised.value)

    own_error, peer_error = run_ranks(2, body)
    assert own_error == (
        "torchbagua: all_to_all of gradient bucket 0 over the world group failed on rank 0 receiving from rank 1: the "
        "cable is unplugged"
    )
    assert re.match(
        r"torchbagua: .* (of|with) gradient bucket 0 over .* failed on rank 1 .* rank 0: closed by peer", peer_error
    )
