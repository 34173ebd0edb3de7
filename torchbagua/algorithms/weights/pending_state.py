"""The saved state of a round whose differences are not yet applied."""

from collections.abc import Mapping
from typing import Any

import torch

from torchbagua.runtime.rank_state import check_rank_state, owner_of
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_buckets import FlatOf, WeightBuckets


def pending_state(
    runner: Runner,
    step: int,
    has_differences: bool,
    differences: Mapping[str, torch.Tensor],
    snapshots: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return the owner, the step, and the averaged differences that are not yet applied, by weight name."""
    return {
        **owner_of(runner.process_group),
        "step": step,
        "has_differences": has_differences,
        "differences": differences,
        "buffer_snapshots": snapshots,
    }


def load_pending_state(
    runner: Runner,
    weights: WeightBuckets,
    state: Mapping[str, Any],
    difference: FlatOf,
    snapshot: FlatOf,
    *other_keys: str,
) -> None:
    """Copy the tensors that `pending_state` has saved into these flat tensors."""
    keys = ("step", "has_differences", "differences", "buffer_snapshots", *other_keys)
    check_rank_state(runner.name, state, keys, runner.process_group)
    weights.load_by_name(difference, state["differences"])
    weights.load_by_name(snapshot, state["buffer_snapshots"], weights.of_buffers)
