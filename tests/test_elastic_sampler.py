"""The sampler of elastic training: every sample of an epoch is trained exactly once, whoever is there."""

import random
from collections import Counter

import pytest
import torch

from torchbagua.elastic.sampler import Sampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_is_in_one_kept_step(drop_last: bool, seed: int) -> None:
    """Ranks come and go between steps, and steps fail. Only the end of an epoch may repeat or leave out a few."""
    draw = random.Random(seed)
    num_samples, batch_size = 101, 3
    samplers = [Sampler(range(num_samples), seed=seed, drop_last=drop_last) for _ in range(4)]
    trained: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    orders: dict[int, list[int]] = {0: [], 1: []}
    while samplers[0].epoch < 2:
        size = draw.randrange(1, 5)
        for rank, sampler in enumerate(samplers):
            sampler.load_state_dict(samplers[0].state_dict())  # one that has left joins again
            sampler.begin(rank, size)
        epoch, members = samplers[0].epoch, samplers[:size]
        assert len({len(sampler) for sampler in members}) == 1
        dealt = [list(sampler) for sampler in members]
        for start in range(0, len(dealt[0]), batch_size):
            batches = [own[start : start + batch_size] for own in dealt]
            for sampler in members:
                sampler.fetch(len(batches[0]))
            if draw.random() < 0.2:
                break  # the step fails on all ranks
            for sampler in samplers:
                sampler.commit() if sampler in members else None
            flat = [sample for samples in zip(*batches, strict=True) for sample in samples]
            trained[epoch].update(flat)
            orders[epoch] += flat
        else:
            for sampler in members:
                sampler.end_epoch()
                sampler.commit()
    for counts in trained.values():
        missing = num_samples - len(counts)
        repeated = sum(counts.values()) - len(counts)
        assert missing <= 3 * drop_last
        assert repeated <= 3 * (not drop_last)
    assert orders[0] != orders[1]


def test_a_sample_that_is_only_accumulated_at_the_end_of_an_epoch_is_dealt_again() -> None:
    sampler = Sampler(range(4), shuffle=False)
    sampler.begin(0, 1)
    sampler.fetch(3)
    sampler.commit()
    sampler.fetch(1)
    sampler.end_epoch()
    assert sampler.epoch == 1
    sampler.begin(0, 1)
    assert (sampler.epoch, list(sampler)) == (0, [3])


def test_states_and_arguments_that_do_not_fit() -> None:
    sampler = Sampler(range(8))
    with pytest.raises(ValueError, match="the state must have num_samples=8, got 9"):
        sampler.load_state_dict(Sampler(range(9)).state_dict())
    with pytest.raises(ValueError, match="the state must have seed=0, got 1"):
        sampler.load_state_dict(Sampler(range(8), seed=1).state_dict())
    with pytest.raises(TypeError, match="dataset must have a length, got generator"):
        Sampler(number for number in range(3))  # type: ignore[arg-type]


def test_the_order_is_that_of_torch() -> None:
    """One rank gets the permutation that DistributedSampler would make."""
    data = torch.utils.data.TensorDataset(torch.arange(20))
    expected = torch.utils.data.distributed.DistributedSampler(data, num_replicas=1, rank=0, seed=5)
    assert list(Sampler(data, seed=5)) == list(expected)
