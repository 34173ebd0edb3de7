"""Residuals of outer gradients, which go on where the same ranks on the same nodes send them."""

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
from torchbagua.runtime.weight_bucket import WeightBucket

_WHOSE = {"rank", "num_ranks", "nodes"}


class OuterResiduals:
    """The residuals of each bucket's outer gradient.

    Args:
        runner: that of the impl.
        nodes: among which shards of what is sent are divided; None if each rank sends all of it.
        has_feedback: False for none.
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
        """Forget which buckets there are, and keep the residuals of their parameters for other buckets."""
        self._of_bucket.clear()

    def of_bucket(self, bucket: WeightBucket, gradient: BaguaBucket) -> TwoPhaseResiduals | None:
        """Return the residuals of a new bucket, whose outer gradient is in `gradient`; None without error feedback."""
        if self._state is None or self._runner.codec_for(gradient) is not self._runner.codec:
            return None
        self._of_bucket[bucket] = residuals = self._state.of_bucket(gradient)
        return residuals

    def commit(self, buckets: Iterable[WeightBucket]) -> None:
        """Commit what a round has staged in these buckets."""
        for bucket in buckets:
            if bucket in self._of_bucket:
                self._of_bucket[bucket].commit()

    def clear(self, names: Container[str]) -> None:
        """Write zeros to the residuals of the weights of these names."""
        for bucket, residuals in self._of_bucket.items():
            residuals.clear(bucket.slices_of(names))

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by the names of parameters, and whose they are."""
        state: dict[str, Any] = {**owner_of(self._runner.process_group), "nodes": repr(self._nodes)}
        return state if self._state is None else state | self._state.state_dict(self._named())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over residuals of as many ranks, on these nodes; drop others, with a RuntimeWarning.

        Buckets then have to be made again, and ask for their residuals.
        """
        size, nodes = self._runner.process_group.size, self._nodes
        self._state = self._new_state()
        if not any(state[kind] for kind in state.keys() - _WHOSE):  # full precision leaves nothing out
            return
        is_alike = (state["num_ranks"], state["nodes"]) == (size, repr(nodes))
        if self._state is not None and is_alike:
            self._state.load_state_dict(self._owner, state, self._named())
            return
        warn_user(
            f"torchbagua: {self._owner}.load_state_dict: residuals of error feedback are dropped: the state is of "
            f"{state['num_ranks']} ranks on the nodes {state['nodes']}, and attached are {size} on {nodes}, with "
            f"compression={self._runner.algorithm.compression!r}"
        )

    def _named(self) -> dict[str, torch.Tensor]:
        return {tensor.name: tensor.parameter for bucket in self._of_bucket for tensor in bucket.tensors}


def check_residuals(owner: str, state: Mapping[str, Any], group: BaguaProcessGroup) -> None:
    """Raise ValueError if `state` is not of `OuterResiduals`, or is of another rank of as many."""
    check_keys(owner, state, sorted(_WHOSE))
    if state["num_ranks"] == group.size:
        check_rank_state(owner, state, (), group)
