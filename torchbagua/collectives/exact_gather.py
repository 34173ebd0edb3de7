"""All-gather of uncompressed rows, flat or hierarchical. FSDP gathers weights in full precision with it."""

import itertools
from collections.abc import Sequence

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.transport.communicator import Communicator

# Channels of exchanges. `AllGather` uses channel 0 of the same connections.
_CROSSING = 1
_FIRST_WITHIN = 2


class ExactGather:
    """Every rank gets the rows of all ranks, byte for byte, and receives each row at its place in the result.

    It needs no memory besides the result. If several of the ranks share a node, a row is sent to each other node once,
    to the rank that forwards it there. The bytes are the same either way, so nodes affect only the time, and may have
    different numbers of ranks. If the communicator does not post messages, every rank sends its row to all others in
    one collective.
    """

    def __init__(self, communicator: Communicator, ranks: Sequence[int], nodes: Sequence[int], name: str) -> None:
        self._communicator = communicator
        self._ranks = ranks
        self._name = name
        own = communicator.rank
        members: dict[int, list[int]] = {}
        for rank in ranks:
            members.setdefault(nodes[rank], []).append(rank)
        if len(members) == len(ranks):  # no rank has another rank on its node to forward a row to
            members = {nodes[own]: list(ranks)}
        mates = members[nodes[own]]
        # The rows that each rank forwards to the others of its node, its own row first.
        self._forwarded = {rank: [rank] for rank in ranks}
        for node, here in members.items():
            for other_node, receivers in members.items():
                if other_node != node:
                    for place, owner in enumerate(here):
                        self._forwarded[receivers[place % len(receivers)]].append(owner)
        self._crossing_to = {rank for rank in ranks if rank != own and own in self._forwarded[rank]}
        crossing_from = self._forwarded[own][1:]
        self._crossing_turns = [
            (target, source)
            for target, source in _ring(ranks, own)
            if target in self._crossing_to or source in crossing_from
        ]
        self._turns_within = _ring(mates, own)
        self._num_within = max(len(self._forwarded[mate]) for mate in mates)

    def __call__(self, out_N: torch.Tensor) -> None:
        """Fill `out_N` with the rows of all ranks. It must already contain this rank's row, at its place."""
        flat = out_N.view(torch.uint8)
        length = flat.numel() // len(self._ranks)
        rows = {rank: flat[at * length : (at + 1) * length] for at, rank in enumerate(self._ranks)}
        empty = flat[:0]
        own = self._communicator.rank
        pipeline = Pipeline(self._communicator, flat.device)
        if not pipeline.posts_messages:  # one collective: uneven nodes would run different numbers of exchanges
            turns = _ring(self._ranks, own)
            Exchange(pipeline, "all_gather", rows, self._name, turns).run(itertools.repeat(rows[own]))
            return
        from_others = self._forwarded[own][1:]
        receives = {source: rows[source] if source in from_others else empty for _, source in self._crossing_turns}
        crossing = Exchange(pipeline, "all_gather", receives, self._name, self._crossing_turns, channel=_CROSSING)
        within: list[tuple[Exchange, torch.Tensor]] = []  # each with the row that this rank forwards
        for index in range(self._num_within):
            forwarded = {
                rank: rows[owners[index]] if index < len(owners) else empty for rank, owners in self._forwarded.items()
            }
            channel = _FIRST_WITHIN + index
            exchange = Exchange(pipeline, "all_gather", forwarded, self._name, self._turns_within, channel=channel)
            within.append((exchange, forwarded[own]))
        crossing.send(rows[own] if target in self._crossing_to else empty for target in crossing.targets)
        own_row, *forwarded_rows = within
        own_row[0].send(itertools.repeat(own_row[1]))
        crossing.wait()
        for exchange, row in forwarded_rows:
            exchange.send(itertools.repeat(row))
        for exchange, _ in within:
            exchange.wait()
        pipeline.wait_for_sends()


def _ring(ranks: Sequence[int], own: int) -> list[tuple[int, int]]:
    """Return the (target, source) of each turn around the ring of these ranks."""
    place, size = ranks.index(own), len(ranks)
    return [(ranks[(place + distance) % size], ranks[place - distance]) for distance in range(1, size)]
