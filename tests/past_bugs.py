"""Bugs of the past as patches of today's code, to show that the simulation would have found them.

Each function of `PAST_BUGS` returns a context manager. Within the context, all ranks of this process have the bug.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from torchbagua.algorithms.qadam.algorithm import WarmupAgreement
from torchbagua.algorithms.weights.asynchronous import BackgroundRounds
from torchbagua.algorithms.weights.diloco import DiLoCoAlgorithmImpl
from torchbagua.collectives.agreement import Settings, Verdict, all_reduce_max
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Residual
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.lockstep import LoadMark, Lockstep
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.store_requests import StoreRequests


def group_closes_while_others_connect() -> AbstractContextManager[object]:
    """A rank that opened and closed a group at once broke connections that slower ranks were still making.

    Fixed in ead68ba.
    """
    return patch.object(BaguaProcessGroup, "_wait_until_all_are_open", lambda group: None)


def search_for_inf_sends_one_number() -> AbstractContextManager[object]:
    """The search for Inf sent one number, a round several: ranks in different places sent different lengths.

    Fixed in f55aa3f.
    """

    def agree_on_overflow(lockstep: Lockstep, found_inf: bool, purpose: str = "the search for Inf") -> bool:
        lockstep.num_overflow_checks += 1
        world = lockstep._world
        return lockstep._lane.submit(lambda: all_reduce_max(world, [int(found_inf)], purpose)).result() == [1]

    return patch.object(Lockstep, "agree_on_overflow", agree_on_overflow)


def qadam_compares_only_during_the_warmup() -> AbstractContextManager[object]:
    """Ranks no longer compared QAdam's progress after the warm-up, so a rank that alone loaded a state sent float32.

    Fixed in 44c1437.
    """
    compare = WarmupAgreement.compare
    num_past_warmup = WeakKeyDictionary[WarmupAgreement, int]()

    def compare_during_warmup(agreement: WarmupAgreement, device: torch.device) -> None:
        q_adam = agreement._q_adam
        before = num_past_warmup.get(agreement, 0)
        num_past_warmup[agreement] = len(q_adam.num_updates_past_warmup)
        if before < len(q_adam.parameters):
            compare(agreement, device)

    return patch.object(WarmupAgreement, "compare", compare_during_warmup)


def residual_counts_twice() -> AbstractContextManager[object]:
    """A second synchronized backward before the step added the same residual again, and dropped the first pass's.

    Fixed in deadeaf.
    """

    def continue_from_committed(residual: Residual, parts: Sequence[slice]) -> None:
        residual._continued = None

    return patch.object(Residual, "continue_from_staged", continue_from_committed)


def failed_attach_cannot_be_retried() -> AbstractContextManager[object]:
    """A rank that gave up on a late rank still counted its attempt, so a retry used other keys of the store.

    Fixed in f090b32.
    """
    agree = BaguaProcessGroup._agree

    def count_failures_too(group: BaguaProcessGroup, same: Settings, refusal: str | None) -> Verdict:
        try:
            return agree(group, same, refusal)
        except TimeoutError:
            group._group_store.add(f"torchbagua/constructed/{group.rank}", 1)
            raise

    return patch.object(BaguaProcessGroup, "_agree", count_failures_too)


def job_is_queued_after_the_stop() -> AbstractContextManager[object]:
    """A job that one thread submitted while another closed the lane was queued behind the stop, and never ran.

    Fixed in f090b32.
    """
    init = Lane.__init__

    def init_without_lock(lane: Lane, *arguments: Any, **named: Any) -> None:
        init(lane, *arguments, **named)
        lane._lock = nullcontext()  # type: ignore[assignment]

    return patch.object(Lane, "__init__", init_without_lock)


def error_of_a_closed_group_has_no_cause() -> AbstractContextManager[object]:
    """After a failure on one thread, another thread raised "the group is closed", which named neither rank nor cause.

    Fixed in 27b5a78.
    """
    close = Communicator.close

    def close_without_cause(communicator: Communicator, failure: CommunicationError | None = None) -> None:
        close(communicator, None)

    return patch.object(Communicator, "close", close_without_cause)


def loaded_weights_are_lost_at_the_next_round() -> AbstractContextManager[object]:
    """DiLoCo did not see weights that were loaded between two rounds: the next round set them to the shadow weights.

    Fixed in 824728b.
    """

    def keep_shadow(impl: DiLoCoAlgorithmImpl, values: Mapping[str, torch.Tensor]) -> None:
        pass

    return patch.object(DiLoCoAlgorithmImpl, "weights_loaded", keep_shadow)


def loaded_weights_are_changed_by_the_outer_round() -> AbstractContextManager[object]:
    """DiLoCo's round in flight changed weights that were loaded meanwhile.

    Fixed in 824728b.
    """

    def drop_nothing(impl: DiLoCoAlgorithmImpl, names: Collection[str]) -> None:
        pass

    return patch.object(DiLoCoAlgorithmImpl, "_drop_differences", drop_nothing)


def loaded_weights_are_changed_by_background_rounds() -> AbstractContextManager[object]:
    """An asynchronous round in flight added the difference to a snapshot from before a load to the loaded weights.

    Fixed in 824728b.
    """

    def load_nothing(rounds: BackgroundRounds, names: Collection[str], loads: LoadMark) -> None:
        pass

    return patch.object(BackgroundRounds, "weights_loaded", load_nothing)


def calls_are_not_compared() -> AbstractContextManager[object]:
    """Ranks that called different methods after the same steps, such as a load and a mean, waited for each other.

    Found by the simulation, in "other call" of DiLoCo. Over gloo, the process of a rank could end.
    """
    comparison = Lockstep.comparison

    def without_call(lockstep: Lockstep, purpose: str, **options: Any) -> Callable[[], bool]:
        return comparison(lockstep, "a call", **options)

    return patch.object(Lockstep, "comparison", without_call)


def late_open_names_no_rank() -> AbstractContextManager[object]:
    """A rank that waited for another one to open its groups raised an error that named no rank.

    Found by the simulation, in "death" and "long stall".
    """
    return patch.object(StoreRequests, "missing_ranks", lambda *_: [])


def pending_load_counts_as_another_one() -> AbstractContextManager[object]:
    """A rank that had not begun a step since a load was said to have loaded other values than ranks that had.

    Found by the simulation, in "skipped step" and "overflow" of asynchronous averaging.
    """

    def with_pending(mark: LoadMark) -> LoadMark:
        return replace(mark, num_loads=mark.num_loads + 1)

    return patch.object(LoadMark, "with_pending", with_pending)


def errors_of_node_gradients_name_ranks_of_the_node() -> AbstractContextManager[object]:
    """An error within a node named ranks by their places on the node, without their numbers in the job.

    Found by the simulation, in "long stall" of local SGD on two nodes.
    """
    init = BaguaProcessGroup.__init__

    def init_without_numbers(group: BaguaProcessGroup, *arguments: Any, **named: Any) -> None:
        init(group, *arguments, **{**named, "global_ranks": None})

    return patch.object(BaguaProcessGroup, "__init__", init_without_numbers)


# `job_is_queued_after_the_stop` needs no training: tests/test_simulation.py finds it with a lane alone.
PAST_BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    bug.__name__: bug
    for bug in (
        group_closes_while_others_connect,
        search_for_inf_sends_one_number,
        qadam_compares_only_during_the_warmup,
        residual_counts_twice,
        failed_attach_cannot_be_retried,
        error_of_a_closed_group_has_no_cause,
        loaded_weights_are_lost_at_the_next_round,
        loaded_weights_are_changed_by_the_outer_round,
        loaded_weights_are_changed_by_background_rounds,
        calls_are_not_compared,
        late_open_names_no_rank,
        pending_load_counts_as_another_one,
        errors_of_node_gradients_name_ranks_of_the_node,
    )
}
