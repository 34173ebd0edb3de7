"""The number of a backward pass: for algorithms that do another thing in each, on all ranks alike."""

from collections.abc import Mapping
from typing import Any

from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.rank_state import check_rank_state
from torchbagua.collectives.agreement import require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup

_COUNT = "num_backward_passes"


class CountingImpl(AlgorithmImpl):
    """A gradient algorithm with a `parameter_state` that counts synchronised backward passes, and saves the count.

    Every rank counts alike, since each of these passes is collective: so ranks never differ in what they do. The count
    goes on where a state is loaded.

    Attributes:
        num_backward_passes: how many have begun, that under way included.
    """

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        super().__init__(process_group, algorithm)
        self.num_backward_passes = 0

    def on_backward_begin(self) -> None:
        """Count the backward."""
        self.num_backward_passes += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the `parameter_state`, and the backward passes so far."""
        return {**super().state_dict(), _COUNT: self.num_backward_passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, see `AlgorithmImpl.load_state_dict`."""
        assert self.parameter_state is not None
        check_rank_state(type(self).__name__, state, [*self.parameter_state.names, _COUNT], self.process_group)
        count = int(state[_COUNT])
        world = self.process_group.world
        progress = {"as backward passes so far in its state": count}
        self.lane.submit(lambda: require_same_progress(world, progress, "loading the state")).result()
        super().load_state_dict(state)
        self.num_backward_passes = count
