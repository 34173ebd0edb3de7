"""The arguments that `torchbagua.fsdp.attach` takes in addition to those of `torchbagua.attach`."""

from dataclasses import dataclass

import torch.distributed as dist

from torchbagua.codecs.base import Compressor, check_compression, needs_feedback


@dataclass(frozen=True)
class Sharding:
    """Which ranks hold the same shards, and how weights are gathered; see `torchbagua.fsdp.attach`."""

    replicate_group: dist.ProcessGroup | None = None
    quantize_weights: str | Compressor | None = None

    def __post_init__(self) -> None:
        if self.replicate_group is not None and not isinstance(self.replicate_group, dist.ProcessGroup):
            raise TypeError(
                "attach: replicate_group must be a torch.distributed.ProcessGroup of which this rank is a member, got "
                f"{type(self.replicate_group).__name__}"
            )
        codec = check_compression("attach: quantize_weights", self.quantize_weights)
        object.__setattr__(self, "quantize_weights", codec)
        if needs_feedback(codec):
            raise ValueError(
                "attach: quantize_weights must not be a codec that needs error feedback, since the residual of weights "
                f"is lost; got {codec!r}"
            )
