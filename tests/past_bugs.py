"""Bugs of the past as patches of today's code, to show that the simulation would have found them.

Each function of `PAST_BUGS` returns a context manager. Within the context, all ranks of this process have the bug.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torchbagua.algorithms.qadam.algorithm import WarmupAgreement
from torchbagua.algorithms.weights.asynchronous import BackgroundRounds
from torchbagua.algorithms.weights.diloco import DiLoCoAlgorithmImpl
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Residual
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.lockstep import LoadMark, Lockstep
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.store_requests import StoreRequests

agree, compare, close = BaguaProcessGroup._agree, WarmupAgreement.compare, Communicator.close
init_group, init_lane, comparison = BaguaProcessGroup.__init__, Lane.__init__, Lockstep.comparison
num_past_warmup = WeakKeyDictionary[WarmupAgreement, int]()


def agree_on_overflow(lockstep: Lockstep, found_inf: bool, purpose: str = "the search for Inf") -> bool:
    lockstep.num_overflow_checks += 1
    world = lockstep._world
    return lockstep._lane.submit(lambda: all_reduce_max(world, [int(found_inf)], purpose)).result() == [1]


def compare_during_warmup(agreement: WarmupAgreement, device: Any) -> None:
    q_adam = agreement._q_adam
    before = num_past_warmup.get(agreement, 0)
    num_past_warmup[agreement] = len(q_adam.num_updates_past_warmup)
    if before < len(q_adam.parameters):
        compare(agreement, device)


def count_failures_too(group: BaguaProcessGroup, *arguments: Any) -> Any:
    try:
        return agree(group, *arguments)
    except TimeoutError:
        group._group_store.add(f"torchbagua/constructed/{group.rank}", 1)
        raise


def init_without_lock(lane: Lane, *arguments: Any, **named: Any) -> None:
    init_lane(lane, *arguments, **named)
    lane._lock = nullcontext()  # type: ignore[assignment]


def init_without_numbers(group: BaguaProcessGroup, *arguments: Any, **named: Any) -> None:
    init_group(group, *arguments, **{**named, "global_ranks": None})


def do_nothing(*arguments: Any) -> None:
    pass


PATCHES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    # A rank that opened and closed a group at once broke connections that slower ranks were still making.
    "group_closes_while_others_connect": (BaguaProcessGroup, "_wait_until_all_are_open", do_nothing),
    # The search for Inf sent one number, a round several: ranks in different places sent different lengths.
    "search_for_inf_sends_one_number": (Lockstep, "agree_on_overflow", agree_on_overflow),
    # Ranks compared QAdam's progress only in the warm-up, so a rank that alone loaded a state sent float32.
    "qadam_compares_only_during_the_warmup": (WarmupAgreement, "compare", compare_during_warmup),
    # A second synchronized backward before the step added the same residual again, and dropped the first pass's.
    "residual_counts_twice": (
        Residual,
        "continue_from_staged",
        lambda residual, parts: setattr(residual, "_continued", None),
    ),
    # A rank that gave up on a late rank still counted its attempt, so a retry used other keys of the store.
    "failed_attach_cannot_be_retried": (BaguaProcessGroup, "_agree", count_failures_too),
    # A job that one thread submitted while another closed the lane was queued behind the stop, and never ran. No
    # training is needed: tests/test_simulation.py finds it with a lane alone.
    "job_is_queued_after_the_stop": (Lane, "__init__", init_without_lock),
    # After a failure on one thread, another raised "the group is closed", which named neither rank nor cause.
    "error_of_a_closed_group_has_no_cause": (
        Communicator,
        "close",
        lambda communicator, failure=None: close(communicator, None),
    ),
    # DiLoCo did not see weights that were loaded between two rounds: the next round set them to the shadow weights.
    "loaded_weights_are_lost_at_the_next_round": (DiLoCoAlgorithmImpl, "weights_loaded", do_nothing),
    # DiLoCo's round in flight changed weights that were loaded meanwhile.
    "loaded_weights_are_changed_by_the_outer_round": (DiLoCoAlgorithmImpl, "_drop_differences", do_nothing),
    # An asynchronous round in flight added the difference to a snapshot from before a load to the loaded weights.
    "loaded_weights_are_changed_by_background_rounds": (BackgroundRounds, "weights_loaded", do_nothing),
    # Ranks that called different methods after the same steps, such as a load and a mean, waited for each other. Found
    # by the simulation, in "other call" of DiLoCo. Over gloo, the process of a rank could end.
    "calls_are_not_compared": (
        Lockstep,
        "comparison",
        lambda lockstep, purpose, **options: comparison(lockstep, "a call", **options),
    ),
    # A rank that waited for another one to open its groups raised an error that named no rank. Found by the
    # simulation, as are the two below.
    "late_open_names_no_rank": (StoreRequests, "missing_ranks", lambda *_: []),
    # A rank that had not begun a step since a load was said to have loaded other values than ranks that had.
    "pending_load_counts_as_another_one": (
        LoadMark,
        "with_pending",
        lambda mark: replace(mark, num_loads=mark.num_loads + 1),
    ),
    # An error within a node named ranks by their places on the node, without their numbers in the job.
    "errors_of_node_gradients_name_ranks_of_the_node": (BaguaProcessGroup, "__init__", init_without_numbers),
}
PAST_BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    name: partial(patch.object, *arguments) for name, arguments in PATCHES.items()
}
