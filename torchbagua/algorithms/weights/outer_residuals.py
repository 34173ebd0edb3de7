"""Residuals of outer gradients, which a loaded state continues if the ranks and their nodes are the same."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState, residual_state
from torchbagua.runtime.rank_state import check_keys, check_rank_state, owner_of
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_buckets import WeightBucket

_OWNER_KEYS = {"rank", "num_ranks", "nodes"}


class OuterResiduals:
    """The residuals of each bucket's outer gradient.

    Args:
        runner: the impl's runner.
        nodes: the node of each rank if ranks send shards to other nodes. None if each rank sends whole outer gradients.
        has_feedback: False for no residuals.
    """

    def __init__(self, runner: Runner, nodes: Sequence[int] | None, *, has_feedback: bool) -> None:
        self._runner = runner
        self._nodes = nodes
        self._has_feedback = has_feedback
        self._owner = runner.name
        self._state = self._new_state()
        self._of_bucket: dict[WeightBucket, TwoPhaseResiduals] = {}

    def _new_state(self) -> ParameterState[TwoPhaseResiduals] | None:
        return residual_state(self._owner) if self._has_feedback else None

    def forget_buckets(self) -> None:
        """Forget the buckets, but keep the residuals of their parameters for new buckets."""
        self._of_bucket.clear()

    def of_bucket(self, bucket: WeightBucket, gradient: BaguaBucket) -> TwoPhaseResiduals | None:
        """Return the residuals of a new bucket with the outer gradient `gradient`. None without error feedback."""
        if self._state is None or self._runner.codec_for(gradient) is not self._runner.codec:
            return None
        self._of_bucket[bucket] = residuals = self._state.of_bucket(gradient)
        return residuals

    def commit(self, buckets: Iterable[WeightBucket]) -> None:
        """Commit the residuals that a round has staged for these buckets."""
        for bucket in buckets:
            if bucket in self._of_bucket:
                self._of_bucket[bucket].commit()

    def clear(self, names: Container[str]) -> None:
        """Zero the residuals of the weights with these names."""
        for bucket, residuals in self._of_bucket.items():
            residuals.clear(bucket.slices_of(names))

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter name, and the rank that owns them."""
        state: dict[str, Any] = {**owner_of(self._runner.process_group), "nodes": repr(self._nodes)}
        return state if self._state is None else state | self._state.state_dict(self._parameters_by_name())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load residuals of the same number of ranks on the same nodes. Drop others, with a RuntimeWarning.

        The buckets must be rebuilt afterwards, and then request their residuals.
        """
        size, nodes = self._runner.process_group.size, self._nodes
        self._state = self._new_state()
        if not any(state[kind] for kind in state.keys() - _OWNER_KEYS):  # full precision has no residuals
            return
        has_same_owner = (state["num_ranks"], state["nodes"]) == (size, repr(nodes))
        if self._state is not None and has_same_owner:
            self._state.load_state_dict(self._owner, state, self._parameters_by_name())
            return
        warn_user(
            f"torchbagua: {self._owner}.load_state_dict: residuals of error feedback are dropped: the state was saved "
            f"by {state['num_ranks']} ranks on the nodes {state['nodes']}, but {size} ranks on the nodes {nodes} are "
            f"attached, with compression={self._runner.algorithm.compression!r}"
        )

    def _parameters_by_name(self) -> dict[str, torch.Tensor]:
        return {tensor.name: tensor.parameter for bucket in self._of_bucket for tensor in bucket.tensors}


def check_residuals(owner: str, state: Mapping[str, Any], group: BaguaProcessGroup) -> None:
    """Raise ValueError unless `OuterResiduals` saved `state`, on the same rank if the number of ranks is the same."""
    check_keys(owner, state, sorted(_OWNER_KEYS))
    if state["num_ranks"] == group.size:
        check_rank_state(owner, state, (), group)
