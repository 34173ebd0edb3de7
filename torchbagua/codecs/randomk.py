"""RandomK: elements of each block that all ranks draw alike, in eight bits each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from torchbagua.codecs.blocks import TensorSpec, WireLayout
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.randomk import RandomKFormat

_KEY = 5  # the column of a table
_KEY_BYTES = 8


@dataclass(frozen=True)
class RandomK(SparseCodec):
    """Elements of each block that are drawn at random, others in each step: 8 bits for each, and a scale for the block.

    All ranks draw the same, so no index travels. All other elements decode to zero. Of a block of 2048, 21 elements are
    kept at `ratio=0.01`, in 25 bytes: 0.1 bits an element. Since this leaves nearly everything out, use it with error
    feedback.

    What is drawn depends on the seed, the step, the name of the parameter and the place of the block in it, and on
    nothing else: it is the same however parameters are grouped in buckets, and however many ranks there are. A block is
    cut into as many strata as elements are kept, and of each stratum one is drawn.

    It needs to know the step. `RandomKAlgorithm` tells it, and so it is not taken elsewhere.

    A kept value is off by at most half a step, which is the largest kept magnitude of the block divided by 254. A block
    that holds a NaN, an Inf or a magnitude of 2^126 or more decodes to NaN, wherever that is in it.

    Args:
        block: how many elements a block has, a multiple of 8 from 8 to 4096.
        ratio: the share of a block that is kept, above 0 and at most 1. `ceil(ratio * block)` elements of a whole block
            are kept, and the same share of a shorter one, rounded up.
        seed: of the draws, an integer of any size.
        step: the number of the step, a tensor int64 [1] on the device of what is coded, which is read whenever
            something is coded. Whoever lays out a wire needs it.

    Raises:
        TypeError, ValueError: an argument is not such a number or tensor.
    """

    op_prefix = "randomk"
    format = RandomKFormat()

    seed: int = 0
    step: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("RandomK", self.seed)
        if self.step is not None and not isinstance(self.step, torch.Tensor):
            raise TypeError(f"RandomK: step must be None or a tensor, int64 [1], got {self.step!r}")
        if self.step is not None and (self.step.dtype != torch.int64 or self.step.shape != (1,)):
            raise ValueError(f"RandomK: step must be int64 [1], got {self.step.dtype} {list(self.step.shape)}")

    def layout(self, spec: TensorSpec, cuts: Sequence[int], *, equal_bytes: bool = False) -> WireLayout:
        if self.step is None:
            raise ValueError(
                f"{self!r} has no step here: it draws other elements in each, and only RandomKAlgorithm tells it the "
                "step; use that, or another codec"
            )
        layout = super().layout(spec, cuts, equal_bytes=equal_bytes)
        return replace(layout, table=torch.cat([layout.table, self._keys(spec)[:, None].to(spec.device)], dim=1))

    def _table(self, layout: WireLayout) -> torch.Tensor:
        assert self.step is not None
        return layout.table + torch.nn.functional.pad(self.step, (_KEY, 0))

    def _keys(self, spec: TensorSpec) -> torch.Tensor:
        """Return the keys of all blocks for step 0, int64."""
        keys = [torch.zeros(0, dtype=torch.int64)]
        for length, (name, first) in zip(spec.segment_lengths, spec.origins, strict=True):
            digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
            key = int.from_bytes(digest[:_KEY_BYTES], "little", signed=True)
            # The lower half is left to the step. Sums wrap around.
            keys.append((torch.arange(first, first + length, self.block) << 32) + key)
        return torch.cat(keys)


def check_seed(owner: str, seed: int) -> None:
    """Raise TypeError unless `seed` is an integer. `owner` is the class that the error names."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{owner}: seed must be an integer, got {seed!r}")
