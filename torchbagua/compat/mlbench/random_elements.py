"""The mean of randomly drawn gradient elements: `SparsifiedAggregation(compression="randomk")`."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import torchbagua as tb


@dataclass(frozen=True)
class RandomElementsAlgorithm(tb.Algorithm):
    """Average a fraction of each gradient's elements, redrawn in each backward pass, with error feedback.

    All ranks draw the same elements, so no index is sent (random-k with memory, Stich, Cordonnier and Jaggi, arXiv
    1809.07599). The drawn elements are sent in full precision.

    Args:
        ratio: the fraction of elements that is sent, above 0 and at most 1; at least one element of each parameter.

    Raises:
        ValueError: `ratio` is out of range.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"{type(self).__name__}: ratio must be above 0 and at most 1, got {self.ratio!r}")

    def make_impl(self, runner: tb.extend.GradientRunner) -> "RandomElementsAlgorithmImpl":
        return RandomElementsAlgorithmImpl(runner)


class RandomElementsAlgorithmImpl(tb.AlgorithmImpl):
    """See `RandomElementsAlgorithm`. Each backward pass with finite gradients on all ranks updates the residuals."""

    algorithm: RandomElementsAlgorithm

    def __init__(self, runner: tb.extend.GradientRunner) -> None:
        super().__init__(runner)
        self.num_backward_passes = 0
        self._residuals: dict[str, torch.Tensor] = {}

    def need_reset(self) -> bool:
        """Count the backward pass that begins."""
        self.num_backward_passes += 1
        return False

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_python_op(self._average_drawn)

    def _average_drawn(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
        sums = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32), copy=True)
        for tensor, values in bucket.views(sums):
            if (residual := self._residuals.get(tensor.name)) is not None:
                values.add_(residual)
        parts = bucket.parts(sums)
        places = [self._draw(tensor.name, part) for tensor, part in parts]
        is_finite = sums.isfinite().all()  # all elements of this rank, also those that are not drawn
        flag = torch.where(is_finite, 0.0, torch.nan).to(sums.dtype)[None]
        sent = torch.cat([*(part[drawn] for (_, part), drawn in zip(parts, places, strict=True)), flag])
        group.all_reduce(sent, average=True, hierarchical=False, name=bucket.name)
        if not sent[-1].isfinite():
            bucket.flat.fill_(torch.nan)
            return
        results = bucket.flat.zero_().split([len(part) for _, part in parts])
        means = sent[:-1].split([len(drawn) for drawn in places])
        for (_, part), drawn, result, mean in zip(parts, places, results, means, strict=True):
            part[drawn] = 0
            result[drawn] = mean.to(result.dtype)
        self._residuals |= {tensor.name: values.clone() for tensor, values in bucket.views(sums)}

    def _draw(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the indices that all ranks draw in this backward pass, int64, independent of the buckets."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.num_backward_passes} {name}".encode()))
        num_drawn = math.ceil(self.algorithm.ratio * len(part))
        return torch.randperm(len(part), generator=generator)[:num_drawn].to(part.device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter, and the number of backward passes."""
        residuals = {name: residual.clone() for name, residual in self._residuals.items()}
        return {"residual": residuals, "num_backward_passes": self.num_backward_passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this rank."""
        self._residuals = {name: residual.clone() for name, residual in state["residual"].items()}
        self.num_backward_passes = int(state["num_backward_passes"])
