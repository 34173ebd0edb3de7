"""Deals the samples of a dataset over the ranks that are there, and keeps the position in the epoch."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler as TorchSampler


class _Position(NamedTuple):
    epoch: int
    num_samples: int


class Sampler(TorchSampler[int]):
    """Deals the samples of an epoch over a number of ranks that may change within the epoch.

    Like DistributedSampler, rank r of R gets every R-th sample from the r-th on, but counted from a position: the
    number of samples of this epoch that all ranks together have trained. A sample is trained when the optimizer has
    stepped. One that a worker of the DataLoader, or the loop, has only fetched is dealt again after a change of the
    membership.

    Without `drop_last`, the last step of an epoch repeats up to R - 1 samples of its beginning, so that every rank has
    one. All other samples are dealt exactly once.

    Args:
        dataset: anything with a length.
        seed: of the order of samples; the same on all ranks.
        shuffle: whether each epoch has another random order. Otherwise it has the dataset's order.
        drop_last: whether to leave out the last samples of an epoch if there is not one for each rank.

    Raises:
        TypeError: `dataset` has no length.
    """

    def __init__(self, dataset: Sized, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"elastic.Sampler: dataset must have a length, got {type(dataset).__name__}")
        self._num_samples = len(dataset)
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._rank, self._size = 0, 1
        self._trained = self._fetched = _Position(0, 0)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0 on."""
        return self._fetched.epoch

    @property
    def num_trained(self) -> int:
        """The number of samples of the epoch that all ranks together have trained."""
        return self._trained.num_samples if self._trained.epoch == self.epoch else 0

    def begin(self, rank: int, size: int) -> None:
        """Deal over `size` ranks, from the first sample that is not trained; `elastic.run` calls it."""
        self._rank, self._size = rank, size
        self._fetched = self._trained

    def fetch(self, num_local: int) -> None:
        """Note that the loop of each rank has got this many of its samples; `run.batches` calls it."""
        num_samples = min(self._fetched.num_samples + num_local * self._size, self._num_samples)
        self._fetched = _Position(self.epoch, num_samples)

    def end_epoch(self) -> None:
        """Note that the loop has got the last sample; `run.batches` calls it."""
        self._fetched = _Position(self.epoch + 1, 0)

    def commit(self) -> None:
        """Note that all samples which the loop has got are trained; `elastic.run` calls it after a step."""
        self._trained = self._fetched

    def __len__(self) -> int:
        """Return the number of samples that this rank still gets in the epoch."""
        left = self._num_samples - self._fetched.num_samples
        return left // self._size if self._drop_last else -(-left // self._size)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._num_samples))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
        first = self._fetched.num_samples + self._rank
        for index in range(first, first + len(self) * self._size, self._size):
            yield order[index % self._num_samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the position that is trained, and the arguments on which it depends."""
        epoch, num_trained = self._trained
        return {"epoch": epoch, "num_trained": num_trained, "seed": self._seed, "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a state, which any number of ranks may have saved.

        Raises:
            ValueError: the state is of another dataset or another seed.
        """
        own = self.state_dict()
        for name in ("num_samples", "seed"):
            if state[name] != own[name]:
                raise ValueError(f"elastic.Sampler: the state must have {name}={own[name]}, got {state[name]}")
        self._trained = self._fetched = _Position(state["epoch"], state["num_trained"])
