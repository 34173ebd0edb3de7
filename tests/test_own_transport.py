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


def train(
    group: dist.ProcessGroup, name: str, transport: TransportMaker | None, nodes: Sequence[int] | None = None
) -> list[Weights]:
    """Return the weights after each step, and after detach."""
    module = copy.deepcopy(MODEL)
    ddp = DistributedDataParallel(module, process_group=group)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = (
        tb.QAdamOptimizer(trained, lr=0.01, warmup_steps=1) if name == "qadam" else torch.optim.SGD(trained, lr=0.1)
    )
    algorithm = init_for(name, [optimizer], **ARGUMENTS.get(name, {}))
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


# One of each way to communicate.
@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        *((name, None) for name in ("gradient_allreduce", "qadam", "powersgd", "low_precision_decentralized")),
        *((name, None) for name in ("async", "streaming_diloco")),
        *((name, [0, 0, 1, 1]) for name in ("bytegrad", "decentralized", "diloco")),
    ],
)
def test_an_algorithm_is_bitwise_equal_to_the_default_transport(
    name: str, nodes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(nodes or "ab")
    expected = run_ranks(size, lambda group: train(group, name, None, nodes))
    monkeypatch.setattr(GlooTransport, "__init__", lambda transport, members: pytest.fail("gloo is opened"))
    found = run_ranks(size, lambda group: train(group, name, QueueTransport, nodes))
    for rank in range(size):
        for expected_weights, found_weights in zip(expected[rank], found[rank], strict=True):
            assert_same_weights([expected_weights, found_weights])


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
