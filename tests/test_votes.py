"""The votes by which ranks that average at their own paces agree on when to stop."""

import pytest
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms.weights.votes import Outcome, Vote, count_votes
from torchbagua.runtime.parameters import LayoutWatch

STOPS = Vote(stops=True, reason="detach")


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ([Vote(), STOPS, Vote()], Outcome(None, 2, False)),
        ([STOPS, Vote(stops=True, wants_mean=True, reason="detach"), Vote(wants_mean=True)], Outcome(None, 2, False)),
        ([STOPS, STOPS, STOPS], Outcome(None, None, False)),
        ([STOPS, Vote(stops=True, wants_mean=True, reason="detach"), STOPS], Outcome(None, None, True)),
        ([Vote(), Vote(leaves=True), STOPS], Outcome(1, 1, False)),
        # A rank that leaves ends the rounds for all ranks, whatever the other ranks stop for.
        ([Vote(stops=True, leaves=True), STOPS, STOPS], Outcome(0, None, False)),
        ([STOPS, Vote(stops=True, reason="abort"), Vote()], Outcome(None, 2, False)),
        ([STOPS, Vote(num_loads=1), Vote()], Outcome(None, 2, False, num_loads=None)),
        ([STOPS, Vote(leaves=True, num_loads=1), Vote(gives_up=True)], Outcome(1, 2, False, num_loads=None)),
    ],
)
def test_all_ranks_come_to_the_same_outcome(votes: list[Vote], outcome: Outcome) -> None:
    def body(group: dist.ProcessGroup) -> Outcome:
        return count_votes(tb.BaguaProcessGroup(group).world, votes[group.rank()], LayoutWatch(""), "a round")

    assert run_ranks(3, body) == [outcome] * 3


@pytest.mark.parametrize("other", [Vote(gives_up=True), STOPS], ids=["gives up", "all stop"])
def test_ranks_with_different_numbers_of_loads_all_raise(other: Vote) -> None:
    def body(group: dist.ProcessGroup) -> None:
        vote = (STOPS, Vote(stops=True, reason="detach", num_loads=1), other)[group.rank()]
        with pytest.raises(tb.CommunicationError, match="number of loads: ranks 0 and 2 have 0, rank 1 has 1"):
            count_votes(tb.BaguaProcessGroup(group).world, vote, LayoutWatch(""), "a round")

    run_ranks(3, body)


def test_ranks_that_stop_for_different_reasons_all_raise() -> None:
    def body(group: dist.ProcessGroup) -> None:
        vote = Vote(stops=True, reason=("abort", "load_state_dict", "abort")[group.rank()])
        with pytest.raises(tb.CommunicationError, match="reasons: ranks 0 and 2 for abort, rank 1 for load_"):
            count_votes(tb.BaguaProcessGroup(group).world, vote, LayoutWatch(""), "a round")

    run_ranks(3, body)
