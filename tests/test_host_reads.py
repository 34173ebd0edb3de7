"""How often the host asks the device for a number: on a GPU it waits each time."""

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.runtime import unstaging
from torchbagua.training import loss_scale
from training import Tower, build

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
NUM_WARM = 3
FEEDBACK = {"compression": "sign1bit", "error_feedback": True}


class Reads:
    """The numbers, or tensors of numbers, that the host has read of tensors of a device, counted by thread.

    Backward calls hooks outside of any mode of torch, so the methods of tensors are replaced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self._counts: Counter[int] = Counter()
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name), device.type))

    def _counted(self, method: Any, device_type: str) -> Any:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._counts[threading.get_ident()] += tensor.device.type == device_type
            return method(tensor, *args, **kwargs)

        return counted

    def take(self) -> int:
        """Return the reads on this thread since the last call."""
        return self._counts.pop(threading.get_ident(), 0)


_uncounted_item = torch.Tensor.item


class PlayedCopy:
    """In place of a copy that a GPU makes for the host, which does not read the number again."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = _uncounted_item(number)

    def value(self) -> float:
        return self._number


@pytest.fixture
def device_of_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, or a CPU that is taken for one."""
    if device.type == "cpu":
        monkeypatch.setattr(unstaging, "requires_host_sync", lambda tensor: True)
        monkeypatch.setattr(loss_scale, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(loss_scale, "HostCopy", PlayedCopy)
    return device


Attached = tuple[torch.optim.Optimizer, tb.Algorithm]


def with_q_adam(parameters: list[torch.nn.Parameter], **arguments: Any) -> Attached:
    optimizer = tb.QAdamOptimizer(parameters, warmup_steps=NUM_WARM, fused=True)
    return optimizer, tb.QAdamAlgorithm(optimizer, **arguments)


def with_sgd(parameters: list[torch.nn.Parameter], algorithm: tb.Algorithm) -> Attached:
    return torch.optim.SGD(parameters, lr=1e-3), algorithm


CASES: dict[str, Callable[[list[torch.nn.Parameter]], Attached]] = {
    "qadam": with_q_adam,
    "qadam, one bit": partial(with_q_adam, **FEEDBACK),
    "bytegrad": partial(with_sgd, algorithm=tb.ByteGradAlgorithm(error_feedback=True)),
    "topk": partial(with_sgd, algorithm=tb.TopKAlgorithm()),
    "powersgd": partial(with_sgd, algorithm=tb.PowerSGDAlgorithm(rank=2, start_step=NUM_WARM, min_rate=1.0)),
}


def reads_of_steps(device: torch.device, case: str, scaler: torch.amp.GradScaler) -> list[list[int]]:
    """The reads of two ranks in each step in which no bucket is new.

    The first is the last of the warm-up; a scaler that is not disabled skips one after it.

    Args:
        device: of the model.
        case: which optimizer and algorithm.
        scaler: of one rank, the others have their own; it may be disabled.
    """
    model = build(lambda: Tower((10,) * 12)).to(device)

    def body(group: dist.ProcessGroup) -> list[int]:
        own_scaler = copy.deepcopy(scaler)
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer, algorithm = CASES[case](list(ddp.parameters()))
        reads = []
        with tb.attach(ddp, optimizer, algorithm, grad_scaler=own_scaler):
            for step in range(2 * NUM_WARM + 2):
                x = torch.ones(2, 10, device=device)
                if own_scaler.is_enabled() and step == 2 * NUM_WARM:
                    x[0, 0] = torch.inf
                loss = own_scaler.scale(ddp(x, 0).square().sum())
                loss.backward()
                own_scaler.step(optimizer)
                own_scaler.update()
                if step not in (0, 1, NUM_WARM):  # DDP rebuilds its buckets, or they send momenta from now on
                    reads.append(counted.take())
                counted.take()
                optimizer.zero_grad()
        assert own_scaler.get_scale() == (512.0 if own_scaler.is_enabled() else 1.0)
        return reads

    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Reads(monkeypatch, device)
        return run_ranks(2, body, device=device)


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing_of_a_gpu(device_of_reads: torch.device, case: str) -> None:
    disabled = torch.amp.GradScaler(device_of_reads.type, enabled=False)
    for reads in reads_of_steps(device_of_reads, case, disabled):
        assert reads == [0] * len(reads)


@pytest.mark.parametrize("case", CASES)
def test_with_a_grad_scaler_it_reads_what_that_reads(device_of_reads: torch.device, case: str) -> None:
    """Whether there was an overflow, once a step; also where it skips the step, which changes the scale."""
    scaler = torch.amp.GradScaler(device_of_reads.type, init_scale=1024.0)
    for reads in reads_of_steps(device_of_reads, case, scaler):
        assert reads == [1] * len(reads)


def test_reads_of_a_cpu_do_not_grow_with_the_parameters() -> None:
    """Where no read is a wait, it looks at all gradients at once, which of them have been averaged."""
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for reads in reads_of_steps(torch.device("cpu"), "qadam, one bit", disabled):
        assert reads[0] == 0
        assert 0 < max(reads[1:]) <= 2


def test_the_loss_scale_is_copied_once_and_read_again_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[float] = []

    class Counted(PlayedCopy):
        def __init__(self, number: torch.Tensor) -> None:
            super().__init__(number)
            copies.append(float(number))

    monkeypatch.setattr(loss_scale, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(loss_scale, "HostCopy", Counted)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    own = loss_scale.LossScale(scaler)
    own.fetch()
    assert (own.read(), copies) == (8.0, []), "there is no tensor of it yet"
    scaler.scale(torch.ones(1))
    for _ in range(2):
        own.fetch()
        assert (own.read(), copies) == (8.0, [8.0])
    scaler.update(4.0)
    assert (own.read(), copies) == (4.0, [8.0]), "since the forward"
    own.fetch()
    assert (own.read(), copies) == (4.0, [8.0, 4.0])
