"""Local momentum: each rank accumulates the momentum of its own gradients, instead of the optimizer."""

from collections.abc import Sequence

import torch

from torchbagua.codecs.cast import Identity
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState


def check_sgd_without_momentum(owner: str, momentum: float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError, prefixed with `owner`, unless all optimizers are SGD without momentum."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"{owner}: with momentum={momentum} the optimizer must be torch.optim.SGD, got "
                f"{type(optimizer).__name__}"
            )
        own = [group["momentum"] for group in optimizer.param_groups if group["momentum"]]
        if own:
            raise ValueError(
                f"{owner}: with momentum={momentum} SGD's momentum must be 0, because the algorithm applies the "
                f"momentum, got {own[0]}"
            )


def append_local_momentum(state: ParameterState[TwoPhaseResiduals], bucket: BaguaBucket) -> None:
    """Append the momentum operation of a single rank, which applies the whole sum of velocities and sends nothing."""
    residuals = state.of_bucket(bucket)
    everything = slice(0, len(bucket.flat))
    residuals.assign_slices(sent=everything, mean=slice(0, 0))
    codec = Identity()
    layout = codec.layout(bucket.spec, (0, len(bucket.flat)))

    def add_momentum(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if residuals.initial is not None:
            residuals.load_whole(residuals.initial)
        residuals.sent.encode(bucket.flat, codec, layout, bucket.flat.view(torch.uint8), everything)

    bucket.append_local_op(add_momentum)
