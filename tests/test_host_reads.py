"""The number of times that the host reads from the device: on a GPU each read blocks."""

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from devices import decide_on_device
from ranks import run_ranks
from torchbagua.training import grad_scaler
from training import Tower, build

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
NUM_WARM = 3
FEEDBACK = {"compression": "sign1bit", "error_feedback": True}


class Reads:
    """Counts the host's reads from tensors of a device, by thread.

    Backward calls hooks outside of any torch mode, so this replaces the methods of tensors.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self._counts: Counter[int] = Counter()
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._count_calls(getattr(torch.Tensor, name), device.type))

    def _count_calls(self, method: Any, device_type: str) -> Any:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._counts[threading.get_ident()] += tensor.device.type == device_type
            return method(tensor, *args, **kwargs)

        return counted

    def take(self) -> int:
        """Return the reads on this thread since the last call."""
        return self._counts.pop(threading.get_ident(), 0)


_uncounted_item = torch.Tensor.item


class ImitatedCopy:
    """Replaces a GPU's asynchronous copy to the host, which is no further read."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = _uncounted_item(number)

    def value(self, wait: object) -> float:
        return self._number


@pytest.fixture
def device_of_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, or a CPU that torchbagua treats as a GPU."""
    if device.type == "cpu":
        decide_on_device(monkeypatch)
        monkeypatch.setattr(grad_scaler, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(grad_scaler, "HostCopy", ImitatedCopy)
    return device


OptimizerAndAlgorithm = tuple[torch.optim.Optimizer, tb.Algorithm]


def with_q_adam(parameters: list[torch.nn.Parameter], **arguments: Any) -> OptimizerAndAlgorithm:
    optimizer = tb.QAdamOptimizer(parameters, warmup_steps=NUM_WARM, fused=True)
    return optimizer, tb.QAdamAlgorithm(optimizer, **arguments)


def with_sgd(parameters: list[torch.nn.Parameter], algorithm: tb.Algorithm) -> OptimizerAndAlgorithm:
    return torch.optim.SGD(parameters, lr=1e-3), algorithm


CASES: dict[str, Callable[[list[torch.nn.Parameter]], OptimizerAndAlgorithm]] = {
    "qadam": with_q_adam,
    "qadam, one bit": partial(with_q_adam, **FEEDBACK),
    "bytegrad": partial(with_sgd, algorithm=tb.ByteGradAlgorithm(error_feedback=True)),
    "topk": partial(with_sgd, algorithm=tb.TopKAlgorithm()),
    "powersgd": partial(with_sgd, algorithm=tb.PowerSGDAlgorithm(rank=2, start_step=NUM_WARM, min_rate=1.0)),
}


def reads_of_steps(device: torch.device, case: str, scaler: torch.amp.GradScaler) -> list[list[int]]:
    """Return the reads of two ranks in each step without a new bucket.

    The first of these steps is the last of the warm-up. An enabled scaler skips a later step.

    Args:
        device: the device of the model.
        case: the optimizer and algorithm, a key of `CASES`.
        scaler: each rank trains with a copy of it; it may be disabled.
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
                if step not in (0, 1, NUM_WARM):  # in these DDP rebuilds its buckets, or buckets begin to send momenta
                    reads.append(counter.take())
                counter.take()
                optimizer.zero_grad()
        assert own_scaler.get_scale() == (512.0 if own_scaler.is_enabled() else 1.0)
        return reads

    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = Reads(monkeypatch, device)
        return run_ranks(2, body, device=device)


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing_from_a_gpu(device_of_reads: torch.device, case: str) -> None:
    disabled = torch.amp.GradScaler(device_of_reads.type, enabled=False)
    for reads in reads_of_steps(device_of_reads, case, disabled):
        assert reads == [0] * len(reads)


@pytest.mark.parametrize("case", CASES)
def test_with_a_grad_scaler_a_step_reads_only_what_the_scaler_reads(device_of_reads: torch.device, case: str) -> None:
    """Once a step: whether gradients overflowed. A skipped step, which changes the scale, reads no more."""
    scaler = torch.amp.GradScaler(device_of_reads.type, init_scale=1024.0)
    for reads in reads_of_steps(device_of_reads, case, scaler):
        assert reads == [1] * len(reads)


def test_reads_on_a_cpu_do_not_grow_with_the_parameters() -> None:
    """If reads do not block, one read determines for all gradients which of them have been averaged."""
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for reads in reads_of_steps(torch.device("cpu"), "qadam, one bit", disabled):
        assert reads[0] == 0
        assert 0 < max(reads[1:]) <= 2


def test_a_read_of_the_loss_scale_waits_as_the_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer than its timeout: the GPU may wait for a rank that has died."""
    done, empty = object(), torch.empty
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: done))
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, pin_memory: empty(shape, dtype=dtype))
    copy_of_scale = grad_scaler.HostCopy(torch.tensor(8.0))
    waited: list[object] = []
    assert copy_of_scale.value(waited.append) == 8.0
    assert waited == [done]


def test_the_loss_scale_is_copied_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[float] = []

    class CountedCopy(ImitatedCopy):
        def __init__(self, number: torch.Tensor) -> None:
            super().__init__(number)
            copies.append(float(number))

    monkeypatch.setattr(grad_scaler, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(grad_scaler, "HostCopy", CountedCopy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    own = grad_scaler.LossScale(scaler, wait=lambda mark: None)
    own.before_forward(())
    assert (own.read(), copies) == (8.0, []), "the scaler has no tensor yet"
    scaler.scale(torch.ones(1))
    for _ in range(2):
        own.before_forward(())
        assert (own.read(), copies) == (8.0, [8.0])
    scaler.update(4.0)
    assert (own.read(), copies) == (4.0, [8.0]), "the scale has changed since it was fetched"
    own.before_forward(())
    assert (own.read(), copies) == (4.0, [8.0, 4.0])
