"""TopKAlgorithm: few bytes are sent, one rank's momentum is SGD's, and the settings that it refuses.

test_error_feedback.py compares it with the oracle, and tests the life of its residuals and velocities.
"""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from test_error_feedback import Loop
from training import Tower, build

MOMENTUM = 0.75
TOWER = build(Tower)


def test_the_momentum_of_a_single_rank_is_that_of_sgd() -> None:
    """Bitwise, with nothing sent. Halfway, another attachment loads the state."""

    def body(group: dist.ProcessGroup) -> None:
        recorder, state = tb.observe.Recorder(), {}
        expected, data = copy.deepcopy(TOWER), torch.Generator().manual_seed(1000)
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.01, momentum=MOMENTUM)
        first = Loop(group, tb.TopKAlgorithm(momentum=MOMENTUM), lr=0.01, observers=[recorder])
        second = Loop(group, tb.TopKAlgorithm(0.1, momentum=MOMENTUM, warmup_steps=2), lr=0.01, observers=[recorder])
        for loop in (first, second):
            with loop.attachment:
                if loop is second:
                    second.ddp.load_state_dict(first.ddp.state_dict())
                    second.data = first.data
                    second.attachment.load_state_dict(state)
                for _ in range(3):
                    optimizer.zero_grad()
                    expected(torch.randn(6, 10, generator=data), 0).square().sum().backward()
                    optimizer.step()
                    before = loop.data.get_state()
                    loop.backward()  # whose gradients are cleared
                    loop.data.set_state(before)
                    loop.step()
                state |= copy.deepcopy(loop.attachment.state_dict())
        assert all(map(torch.equal, second.ddp.parameters(), expected.parameters()))
        assert recorder.bytes_sent == 0

    run_ranks(1, body)


def test_a_hundredth_of_a_gradient_is_sent_in_far_less_of_its_bytes() -> None:
    # One parameter of 64 blocks, which DDP puts into a separate bucket.
    model = build(lambda: torch.nn.Linear(256, 512, bias=False))

    def body(group: dist.ProcessGroup) -> int:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        recorder = tb.observe.Recorder()
        with tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), tb.TopKAlgorithm(), observers=[recorder]):
            ddp(torch.randn(3, 256, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()
        return recorder.bytes_sent

    full_bytes = 4 * 256 * 512  # for a two-phase mean over 2 ranks in float32
    for sent in run_ranks(2, body):
        assert int(full_bytes / sent) == 151


def test_optimizers_and_parameters_that_are_refused() -> None:
    """Also a momentum, or betas, that a scheduler sets later."""
    with_momentum, without = tb.TopKAlgorithm(momentum=0.9), tb.TopKAlgorithm()

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        parameters = list(ddp.parameters())
        for optimizer, message in (
            (torch.optim.Adam(parameters), "the optimizer must be torch.optim.SGD, got Adam"),
            (torch.optim.SGD(parameters, lr=0.1, momentum=0.5), "SGD's momentum must be 0, .*got 0.5"),
            (
                torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.5}]),
                "SGD's momentum must be 0, .*got 0.5",
            ),
        ):
            with pytest.raises(ValueError, match=f"^TopKAlgorithm: with momentum=0.9 {message}"):
                tb.attach(ddp, optimizer, with_momentum)
            with pytest.warns(RuntimeWarning, match="TopKAlgorithm with"):  # without a momentum, only a warning
                tb.attach(ddp, optimizer, without).detach()
        for make, algorithm, later, message in (
            (torch.optim.SGD, with_momentum, {"momentum": 0.5}, r"momentum must be 0, .*got 0\.5"),
            (
                partial(torch.optim.AdamW, betas=(0.0, 0.0)),
                without,
                {"betas": (0.9, 0.0)},
                "first of AdamW's betas must be 0 if the second is, .*scheduler",
            ),
        ):
            ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
            optimizer = make(ddp.parameters(), lr=0.1)
            with tb.attach(ddp, optimizer, algorithm):
                ddp(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.param_groups[0].update(later)
                with pytest.raises(ValueError, match=message):
                    ddp(torch.ones(1, 3)).sum().backward()
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2).double(), process_group=group)
        with pytest.raises(ValueError, match=r"^TopKAlgorithm: with momentum=0\.9 .* got torch\.float64 for weight"):
            tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), with_momentum)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0.0}, "ratio must be above 0 and at most 1, got 0.0"),
        ({"block": 100}, "block must be a multiple of 8 from 8 to 4096, got 100"),
        ({"selection": "bottom"}, "selection must be one of ['block', 'top'], got 'bottom'"),
        ({"selection": ["top"]}, "selection must be one of ['block', 'top'], got ['top']"),
        ({"momentum": 1.0}, "momentum must be None or a number above 0 and below 1, got 1.0"),
        ({"momentum": "0.9"}, "momentum must be None or a number above 0 and below 1, got '0.9'"),
        ({"momentum_masking": 1}, "momentum_masking must be True or False, got 1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer, got 1.5"),
        ({"warmup_steps": 10, "ratio": 0.25}, "warmup_steps must be 0 with a ratio of 0.25 or more"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^TopKAlgorithm: {re.escape(message)}"):
        tb.TopKAlgorithm(**arguments)
