"""The order in which exchanges that are in flight together send, receive and compute."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from ranks import run_ranks
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.transport.communicator import Communicator

SIZE = 3
LONG, SHORT = 100_000, 10  # elements
PIECES = ("first", "second")


def log_messages(communicator: Communicator) -> list[str]:
    """Return a list to which the communicator appends posted and received messages, with their piece and peer."""
    log: list[str] = []
    post, wait = communicator.post, communicator.wait

    def log_and_post(direction: Any, peer: int, tensor: torch.Tensor, *, tag: int, purpose: str) -> None:
        log.append(f"{'expects' if direction == 'receiving from' else 'sends'} {PIECES[tag // 4]} {peer}")
        post(direction, peer, tensor, tag=tag, purpose=purpose)

    def log_and_wait(direction: Any, peer: int, *, tag: int, purpose: str) -> None:
        wait(direction, peer, tag=tag, purpose=purpose)
        if direction == "receiving from":
            log.append(f"received {PIECES[tag // 4]} {peer}")

    communicator.post, communicator.wait = log_and_post, log_and_wait  # type: ignore[method-assign,assignment]
    return log


def run_two_exchanges(num_elements: int, rate: float) -> list[list[str]]:
    """Run two exchanges in one pipeline, and return each rank's operations in their order."""

    def body(group: dist.ProcessGroup) -> list[str]:
        world = tb.BaguaProcessGroup(group).world
        world.link_bytes_per_s = [rate] * SIZE
        log = log_messages(world)

        def compute(piece: str, exchange: Exchange) -> Iterator[torch.Tensor]:
            for target in exchange.targets:
                log.append(f"computes {piece} {target}")
                yield torch.full((num_elements,), float(world.rank))

        pipeline = Pipeline(world, CPU)
        receives = [[torch.zeros(num_elements) for _ in range(SIZE)] for _ in PIECES]
        exchanges = [
            Exchange(pipeline, "all_to_all", tensors, "numbers", channel=channel)
            for channel, tensors in enumerate(receives)
        ]
        for name, exchange in zip(PIECES, exchanges, strict=True):
            exchange.send(compute(name, exchange))
        for (name, exchange), tensors in zip(zip(PIECES, exchanges, strict=True), receives, strict=True):
            for source in exchange.arrivals():
                assert tensors[source].unique().tolist() == [float(source)]
                log.append(f"decodes {name} {source}")
        pipeline.wait_for_sends()
        return log

    return run_ranks(SIZE, body)


def test_over_slow_links_a_turn_begins_before_received_values_are_decoded() -> None:
    """And one link at a time carries data, while the next tensor is computed."""
    for rank, log in enumerate(run_two_exchanges(LONG, -1e12)):
        peers = [(rank + 1) % SIZE, (rank - 1) % SIZE]
        turns = [
            (f"{piece} {target}", f"{piece} {source}")
            for piece in PIECES
            for target, source in zip(peers, peers[::-1], strict=True)
        ]
        expected = [entry for entry in log if entry.startswith(("expects", "received"))]
        assert expected == [f"{verb} {source}" for _, source in turns for verb in ("expects", "received")]
        for (_, source), (target, _) in itertools.pairwise(turns):
            order = [f"computes {target}", f"received {source}", f"sends {target}", f"decodes {source}"]
            assert sorted(order, key=log.index) == order


@pytest.mark.parametrize(("num_elements", "rate"), [(SHORT, -1e12), (LONG, 1e12)])
def test_short_or_fast_messages_are_sent_at_once_in_two_exchanges(num_elements: int, rate: float) -> None:
    """Each as soon as it is computed, after all receives are posted."""
    num_messages = len(PIECES) * (SIZE - 1)
    for log in run_two_exchanges(num_elements, rate):
        assert all(entry.startswith("expects") for entry in log[:num_messages])
        sent = log[num_messages : 3 * num_messages]
        assert [entry.split()[0] for entry in sent] == ["computes", "sends"] * num_messages
        assert all(
            computed.split()[1:] == posted.split()[1:] for computed, posted in zip(sent[::2], sent[1::2], strict=True)
        )


def test_a_third_exchange_is_sent_when_the_first_has_arrived() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        world = tb.BaguaProcessGroup(group).world
        peer = 1 - world.rank
        sent: list[str] = []
        post = world.post

        def log_and_post(direction: Any, peer: int, tensor: torch.Tensor, *, tag: int, purpose: str) -> None:
            if direction == "sending to":
                sent.append(purpose)
            post(direction, peer, tensor, tag=tag, purpose=purpose)

        world.post = log_and_post  # type: ignore[method-assign,assignment]
        pipeline = Pipeline(world, CPU)
        names = ["a", "b", "c"]
        receives = [torch.zeros(SHORT) for _ in names]
        exchanges = [
            Exchange(pipeline, "all_to_all", {peer: tensor}, name, [(peer, peer)], channel=channel)
            for channel, (name, tensor) in enumerate(zip(names, receives, strict=True))
        ]
        for value, exchange in enumerate(exchanges):
            exchange.send([torch.full((SHORT,), 10.0 * value + world.rank)])
        assert len(sent) == 2, "no more than two messages to a peer"
        exchanges[0].wait()
        assert len(sent) == 3
        for exchange in exchanges[1:]:
            exchange.wait()
        pipeline.wait_for_sends()
        assert [tensor[0].item() for tensor in receives] == [10.0 * value + peer for value in range(3)]
        return sent

    assert run_ranks(2, body) == [[f"all_to_all of {name}" for name in "abc"]] * 2
