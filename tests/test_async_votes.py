"""The votes by which ranks that average at their own paces agree on when to stop."""

import pytest
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms.weights.asynchronous import Vote, count_votes
from torchbagua.runtime.parameters import LayoutWatch

STOPS = Vote(reason="detach")


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ([Vote(), STOPS, Vote()], (None, 2, False)),
        ([STOPS, Vote(reason="detach", wants_mean=True), Vote(wants_mean=True)], (None, 2, False)),
        ([STOPS, STOPS, STOPS], (None, None, False)),
        ([STOPS, Vote(reason="detach", wants_mean=True), STOPS], (None, None, True)),
        ([Vote(), Vote(leaves=True), STOPS], (1, 1, False)),
        # A rank that leaves ends the rounds for all ranks, whatever the other ranks stop for.
        ([Vote(reason="abort", leaves=True), STOPS, STOPS], (0, None, False)),
        ([STOPS, Vote(reason="abort"), Vote()], (None, 2, False)),
        ([STOPS, Vote(num_loads=1), Vote()], (None, 2, False)),
        ([STOPS, Vote(leaves=True, num_loads=1), Vote(gives_up=True)], (1, 2, False)),
    ],
)
def test_all_ranks_come_to_the_same_outcome(votes: list[Vote], outcome: tuple[int | None, int | None, bool]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int | None, int | None, bool]:
        world = tb.BaguaProcessGroup(group).world
        *found, of_ranks = count_votes(world, votes[group.rank()], LayoutWatch(""), "a round")
        assert of_ranks == votes
        return found[0], found[1], found[2]

    assert run_ranks(3, body) == [outcome] * 3


@pytest.mark.parametrize("other", [Vote(gives_up=True), STOPS], ids=["gives up", "all stop"])
def test_ranks_with_different_numbers_of_loads_all_raise(other: Vote) -> None:
    def body(group: dist.ProcessGroup) -> None:
        vote = (STOPS, Vote(reason="detach", num_loads=1), other)[group.rank()]
        with pytest.raises(tb.CommunicationError, match="number of loads: ranks 0 and 2 have 0, rank 1 has 1"):
            count_votes(tb.BaguaProcessGroup(group).world, vote, LayoutWatch(""), "a round")

    run_ranks(3, body)
