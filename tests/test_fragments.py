"""Fragments have about equal numbers of bytes, and separate rounds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import running
from ranks import run_ranks
from torchbagua.algorithms.weights.diloco import assign_fragments
from torchbagua.observe import Recorder
from torchbagua.runtime.parameters import BaguaTensor


def named(sizes: list[int]) -> list[BaguaTensor]:
    return [BaguaTensor(str(index), nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]


def test_fragments_balance_bytes() -> None:
    sizes = [7, 1000, 3, 400, 400, 90, 5, 64]
    found = assign_fragments(named(sizes), 3)
    in_each = [
        sum(sizes[int(name)] for name, assigned in found.items() if assigned == fragment) for fragment in range(3)
    ]
    assert found.keys() == {str(index) for index in range(8)}
    assert sorted(in_each) == [479, 490, 1000]
    assert set(assign_fragments(named(sizes), 8).values()) == set(range(8))


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
    algorithm = tb.DiLoCoAlgorithm(interval, fragments=num_fragments)

    def body(group: dist.ProcessGroup) -> dict[str, list[int]]:
        module = nn.Module()
        for index, size in enumerate([8, 4, 2][:num_fragments]):
            module.register_parameter(str(index), nn.Parameter(torch.zeros(size)))
        module.register_buffer("running_mean", torch.zeros(6))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        recorder = Recorder()
        steps: dict[str, list[int]] = {}
        with running(group, algorithm, module=module, observers=[recorder]) as (runner, impl):
            end_step = impl.init_post_optimizer_step_hook(module)
            for step in range(1, 13):
                recorder.events.clear()
                end_step(optimizer)
                runner.tracer.deliver()
                sent = {event.bucket for event in recorder.events if event.phase == "send"}
                for bucket in runner.weights:
                    if bucket.name in sent:
                        steps.setdefault(bucket.tensors[0].name, []).append(step)
        return steps

    for steps in run_ranks(2, body):
        assert [steps[str(index)] for index in range(num_fragments)] == due_after
        assert steps["running_mean"] == due_after[-1]
