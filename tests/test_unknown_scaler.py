"""A GradScaler that attach was not given: one warning, in the first step that the GradScaler calls."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import run_ranks

ALGORITHM = tb.ByteGradAlgorithm(error_feedback=True)


class Training:
    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        self.ddps = [DistributedDataParallel(nn.Linear(3, 3), process_group=group) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1, **options) for ddp in self.ddps]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def backward(self, share: float = 1.0) -> None:
        for ddp, optimizer in zip(self.ddps, self.optimizers, strict=True):
            optimizer.zero_grad()
            self.scaler.scale(share * ddp(torch.ones(1, 3)).sum()).backward()


def warnings_of(train: Callable[[Training], None], **options: Any) -> list[str]:
    def body(group: dist.ProcessGroup) -> Sequence[Any]:
        training = Training(group, **options)
        with tb.attach(training.ddps, training.optimizers, ALGORITHM):
            train(training)
        values = [getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in training.optimizers]
        assert all(isinstance(value, bool) for value in values)  # nothing is left there
        return values

    with torchbagua_warnings() as messages:
        (values,) = run_ranks(1, body)
    assert values == [bool(options.get("fused"))] * 2
    return messages


@pytest.mark.parametrize(("scaled", "fused"), [((0,), True), ((1,), False), ((0, 1), True), ((0, 1), False)])
def test_a_scaler_of_one_or_of_several_optimizers(scaled: Sequence[int], fused: bool) -> None:
    def train(training: Training) -> None:
        for _ in range(3):
            training.backward()
            for index, optimizer in enumerate(training.optimizers):
                if index in scaled:
                    training.scaler.step(optimizer)
                else:
                    optimizer.step()
            training.scaler.update()

    (message,) = warnings_of(train, fused=fused)
    assert "SGD is stepped by a GradScaler that ByteGradAlgorithm was not given" in message


def test_a_scaler_that_skips_the_first_steps() -> None:
    def train(training: Training) -> None:
        for share in (torch.inf, torch.inf, 1.0):
            training.backward(share)
            for optimizer in training.optimizers:
                training.scaler.step(optimizer)
            training.scaler.update()

    (message,) = warnings_of(train)
    assert "pass the GradScaler" in message


def test_a_loop_that_asks_within_the_step_whether_the_optimizer_unscales() -> None:
    """Lightning does so before it clips gradients, also without a GradScaler; the closure runs backward."""

    def train(training: Training) -> None:
        training.scaler = torch.amp.GradScaler("cpu", enabled=False)

        def closure() -> float:
            assert not training.optimizers[0]._step_supports_amp_scaling
            training.backward()
            return 0.0

        training.backward()
        for _ in range(3):
            for optimizer in training.optimizers[:1]:
                optimizer.step(closure)
            training.optimizers[1].step()

    assert warnings_of(train) == []


def test_an_attachment_that_ends_before_the_first_step_leaves_nothing() -> None:
    assert warnings_of(lambda training: training.backward()) == []


def test_two_attachments_of_one_optimizer() -> None:
    def body(group: dist.ProcessGroup) -> None:
        training = Training(group)
        optimizer = torch.optim.SGD([parameter for ddp in training.ddps for parameter in ddp.parameters()])
        training.optimizers = [optimizer, optimizer]
        with tb.attach(training.ddps[0], optimizer, ALGORITHM), tb.attach(training.ddps[1], optimizer, ALGORITHM):
            training.backward()
            training.scaler.step(optimizer)
        assert optimizer._step_supports_amp_scaling is False

    with torchbagua_warnings() as messages:
        run_ranks(1, body)
    assert len(messages) == 2


def test_ranks_that_average_weights_compare_their_backward_passes_from_then_on() -> None:
    def body(group: dist.ProcessGroup) -> list[bool]:
        training = Training(group)
        found = []
        with tb.attach(training.ddps, training.optimizers, "decentralized") as attachment:
            training.backward()
            for optimizer in training.optimizers:
                found.append(attachment.runner.has_unknown_scaler)
                training.scaler.step(optimizer)
            found.append(attachment.runner.has_unknown_scaler)
        return found

    with torchbagua_warnings() as messages:
        assert run_ranks(2, body) == [[False, True, True]] * 2
    assert all("not given: ranks would skip different steps; pass" in message for message in messages)
    assert len(messages) == 2
