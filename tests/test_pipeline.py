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
    for rank, log in enumerate(run_two_exchanges(LONG, -1e12)):
        after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
        turns = [(piece, *peers) for piece in PIECES for peers in ((after, before), (before, after))]
        expected = [f"expects first {before}", f"computes first {after}", f"sends first {after}"]
        for place, (piece, _, source) in enumerate(turns):
            later = [f"{piece} {target}" for piece, target, _ in turns[place + 1 :]]
            if place == 0:
                expected.append(f"computes {later[0]}")
            expected.append(f"received {piece} {source}")
            if later:
                next_piece, _, next_source = turns[place + 1]
                expected += [f"expects {next_piece} {next_source}", f"sends {later[0]}"]
            expected += [f"computes {target}" for target in later[1:2]]
            expected.append(f"decodes {piece} {source}")
        assert log == expected


@pytest.mark.parametrize(("num_elements", "rate"), [(SHORT, -1e12), (LONG, 1e12)])
def test_short_or_fast_messages_are_sent_at_once_in_two_exchanges(num_elements: int, rate: float) -> None:
    for rank, log in enumerate(run_two_exchanges(num_elements, rate)):
        peers = [(rank + 1) % SIZE, (rank - 1) % SIZE]
        expected = [f"expects {piece} {peer}" for piece in PIECES for peer in reversed(peers)]
        for piece, target in itertools.product(PIECES, peers):
            expected += [f"computes {piece} {target}", f"sends {piece} {target}"]
        for piece, source in itertools.product(PIECES, reversed(peers)):
            expected += [f"received {piece} {source}", f"decodes {piece} {source}"]
        assert log == expected


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
