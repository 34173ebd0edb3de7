"""Fragments have about equal numbers of bytes, and separate rounds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms.weights.fragments import Fragments
from torchbagua.runtime.bucket import BaguaTensor
from torchbagua.runtime.weight_buckets import WeightBucket


def named(sizes: list[int]) -> list[BaguaTensor]:
    return [BaguaTensor(str(index), nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]


def test_fragments_balance_bytes() -> None:
    sizes = [7, 1000, 3, 400, 400, 90, 5, 64]
    tensors = named(sizes)
    fragments = Fragments(3, interval=30)
    fragments.assign(tensors)
    found = fragments.by_name
    in_each = [
        sum(sizes[int(name)] for name, assigned in found.items() if assigned == fragment) for fragment in range(3)
    ]
    assert found.keys() == {str(index) for index in range(8)}
    assert sorted(in_each) == [479, 490, 1000]
    one_each = Fragments(8, interval=30)
    one_each.assign(tensors)
    assert set(one_each.by_name.values()) == set(range(8))


def test_new_parameters_replace_earlier_parameters() -> None:
    fragments = Fragments(2, interval=4)
    fragments.assign(named([3, 5]))
    fragments.assign(named([4]))
    assert fragments.by_name == {"0": 0}


@pytest.mark.parametrize(
    ("num_fragments", "interval", "due_after"),
    [
        (1, 3, [[3, 6, 9, 12]]),
        (2, 5, [[2, 7, 12], [5, 10]]),
        (3, 4, [[1, 5, 9], [2, 6, 10], [4, 8, 12]]),
    ],
)
def test_rounds_of_fragments_take_turns(num_fragments: int, interval: int, due_after: list[list[int]]) -> None:
    """Buffers, which are in no fragment, are averaged with the last."""
    fragments = Fragments(num_fragments, interval)
    tensors = named([8, 4, 2][:num_fragments])
    fragments.assign(tensors)

    def body(group: dist.ProcessGroup) -> list[list[int]]:
        own = tb.BaguaProcessGroup(group)
        buffer = BaguaTensor("running_mean", torch.zeros(6))
        buckets = [
            WeightBucket("a test", [tensor], own, torch.zeros(tensor.parameter.numel()))
            for tensor in [*tensors, buffer]
        ]
        return [[step for step in range(1, 13) if fragments.is_due(bucket, step)] for bucket in buckets]

    *of_parameters, of_buffers = run_ranks(1, body)[0]
    assert of_parameters == due_after
    assert of_buffers == due_after[-1]
    assert [fragments.of_tensor(tensor) for tensor in tensors] == list(range(num_fragments))
