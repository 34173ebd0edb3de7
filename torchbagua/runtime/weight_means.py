"""WeightMeans: the mean of all ranks' weights, for an evaluation or at the end of an attachment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchbagua.collectives.agreement import fingerprint
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.weight_bucket import WeightBucket

if TYPE_CHECKING:
    from torchbagua.runtime.weight_buckets import WeightBuckets

_PART_ELEMENTS = 2**21  # for tensors outside buckets, since the group caches buffers for each length that it averages


class WeightMeans:
    """Computes the mean of all ranks' weights, apart from the algorithm's rounds. Call its methods between two steps.

    Args:
        weights: the weights.
        group: the ranks.
    """

    def __init__(self, weights: "WeightBuckets", group: BaguaProcessGroup) -> None:
        self._weights = weights
        self._group = group
        self._own: dict[WeightBucket, torch.Tensor] = {}  # this rank's weights, while the module has the mean

    def take(self) -> None:
        """Give all ranks the mean of their weights. Collective. The buckets cannot be used for anything else after."""
        weights = self._weights
        for bucket in weights:
            bucket.clear_ops().append_centralized_synchronous_op(hierarchical=False)
        weights.read()
        weights.lockstep.submit(lambda: [bucket.run() for bucket in weights], "the last mean", is_last=True).finish()
        weights.write()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the context, and restore each rank's weights afterwards.

        Collective on entry. The flat tensors of the buckets do not change. It needs additional memory of the size of
        the weights, and of twice that size while it computes the mean.
        """
        if self._group.size == 1:
            yield
            return
        weights, group = self._weights, self._group
        own = {bucket: torch.empty_like(bucket.flat) for bucket in weights}
        weights.read(own.__getitem__)
        means = {bucket: flat.clone() for bucket, flat in own.items()}

        def average() -> None:
            for bucket, mean in means.items():
                group.all_reduce(mean, average=True, hierarchical=False, name=bucket.name)

        weights.lockstep.submit(average, "the mean of the weights").finish()
        weights.write(means.__getitem__)
        means.clear()
        self._own = own
        try:
            yield
        finally:
            self._own = {}
            weights.write(own.__getitem__)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Within `averaged`, give this rank its local weights within this context; elsewhere it has them already.

        Not collective. It needs additional memory of the size of the weights.
        """
        if not self._own:
            yield
            return
        means = {bucket: torch.empty_like(flat) for bucket, flat in self._own.items()}
        self._weights.read(means.__getitem__)
        self._weights.write(self._own.__getitem__)
        try:
            yield
        finally:
            self._weights.write(means.__getitem__)

    @torch.no_grad()
    def average_tensors(self, tensors: Sequence[torch.Tensor], purpose: str) -> None:
        """Replace these tensors, which do not belong to the module, by their mean over the ranks. Collective.

        Call it within `averaged`, or after the last mean, when no round is in progress.

        Args:
            tensors: floating-point or complex, contiguous or not, with the same shapes and dtypes on all ranks.
            purpose: the description of the tensors, for errors.
        """
        if self._group.size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        flats = {key: torch.cat([tensor.reshape(-1) for tensor in members]) for key, members in by_kind.items()}
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        also = ("as fingerprint of the other tensors to average", fingerprint(layout))
        group = self._group

        def average() -> None:
            for flat in flats.values():
                for part in flat.split(_PART_ELEMENTS):
                    group.all_reduce(part, average=True, hierarchical=False, name=purpose)

        self._weights.lockstep.submit(average, f"the mean of {purpose}", also=also).finish()
        for key, members in by_kind.items():
            parts = flats[key].split([tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
