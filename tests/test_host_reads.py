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


def with_q_adam(parameters: list[torch.nn.Parameter], **arguments: Any) -> tuple[torch.optim.Optimizer, tb.Algorithm]:
    optimizer = tb.QAdamOptimizer(parameters, warmup_steps=NUM_WARM, fused=True)
    return optimizer, tb.QAdamAlgorithm(optimizer, **arguments)


CASES: dict[str, Callable[[list[torch.nn.Parameter]], tuple[torch.optim.Optimizer, tb.Algorithm]]] = {
    "qadam": with_q_adam,
    "qadam, one bit": partial(with_q_adam, compression="sign1bit", error_feedback=True),
    **{
        name: lambda parameters, algorithm=algorithm: (torch.optim.SGD(parameters, lr=1e-3), algorithm)  # type: ignore[misc]
        for name, algorithm in {
            "bytegrad": tb.ByteGradAlgorithm(error_feedback=True),
            "topk": tb.TopKAlgorithm(),
            "powersgd": tb.PowerSGDAlgorithm(rank=2, start_step=NUM_WARM, min_rate=1.0),
        }.items()
    },
}


def reads_of_steps(device: torch.device, case: str, scaler: torch.amp.GradScaler) -> list[list[int]]:
    """Return the reads of two ranks in each step without a new bucket.

    The first of these steps is the last of the warm-up. Each rank trains with a copy of `scaler`, which may be disabled
    and otherwise skips a later step.
    """
    model = build(lambda: Tower((10,) * 12)).to(device)

    def body(group: dist.ProcessGroup) -> list[int]:
        own_scaler, reads = copy.deepcopy(scaler), []
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer, algorithm = CASES[case](list(ddp.parameters()))
        with tb.attach(ddp, optimizer, algorithm, grad_scaler=own_scaler):
            for step in range(2 * NUM_WARM + 2):
                x = torch.ones(2, 10, device=device)
                if own_scaler.is_enabled() and step == 2 * NUM_WARM:
                    x[0, 0] = torch.inf
                own_scaler.scale(ddp(x, 0).square().sum()).backward()
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


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_only_what_a_grad_scaler_reads(device_of_reads: torch.device, case: str, has_scaler: bool) -> None:
    """Once a step: whether gradients overflowed. A skipped step, which changes the scale, reads no more."""
    scaler = torch.amp.GradScaler(device_of_reads.type, init_scale=1024.0, enabled=has_scaler)
    for reads in reads_of_steps(device_of_reads, case, scaler):
        assert reads == [int(has_scaler)] * len(reads)


def test_the_loss_scale_is_copied_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read waits as the group does, no longer than its timeout: the GPU may wait for a rank that has died."""
    copied, mark, empty = object(), SimpleNamespace, torch.empty
    marks, waited = list[object](), list[object]()

    def record_event() -> object:
        marks.append(copied)
        return copied

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mark(record_event=record_event))
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(grad_scaler, "is_on_gpu", lambda tensor: True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    own = grad_scaler.LossScale(scaler, wait=waited.append)
    own.before_forward(())
    assert (own.read(), len(marks)) == (8.0, 0), "the scaler has no tensor yet"
    scaler.scale(torch.ones(1))
    for _ in range(2):
        own.before_forward(())
        assert (own.read(), len(marks)) == (8.0, 1)
    assert set(waited) == {copied}
    scaler.update(4.0)
    assert (own.read(), len(marks)) == (4.0, 1), "the scale has changed since it was fetched"
    own.before_forward(())
    assert (own.read(), len(marks)) == (4.0, 2)
