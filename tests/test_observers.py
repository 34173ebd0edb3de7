"""Observers: how they are called, how their errors are reported, and that they do not change training."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.observe.events import Trace
from tracing import train_traced
from training import Tower, build


class Failing:
    """An observer that raises on its third event."""

    def __init__(self) -> None:
        self.num_heard = 0

    def on_comm(self, event: tb.observe.CommEvent) -> None:
        self.num_heard += 1
        if self.num_heard == 3:
            raise KeyError("of the user's")


def test_an_observer_that_raises_is_dropped_and_training_continues() -> None:
    failing, recorders = [Failing(), Failing()], [tb.observe.Recorder(), tb.observe.Recorder()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachments = train_traced(
            2, "bytegrad", lambda group: [failing[group.rank()], recorders[group.rank()]], num_steps=3
        )
    assert [observer.num_heard for observer in failing] == [3, 3]
    messages = [str(warning.message) for warning in caught if "observer Failing" in str(warning.message)]
    assert len(messages) == 2, "one warning on each rank"
    for message in messages:
        assert "gets no more events; training continues" in message
        assert "Traceback" in message
        assert "of the user's" in message
    for attachment, recorder in zip(attachments, recorders, strict=True):
        assert sum(event.phase == "step" for event in recorder.events) == 3, "others still hear"
        assert "Failing stopped in step 0: KeyError" in str(attachment.summary())


@pytest.mark.parametrize("method", ["on_start", "samples", "on_end"])
def test_a_trace_that_raises_elsewhere_is_dropped_too(method: str) -> None:
    def fail(self: object, *args: object) -> None:
        raise OSError("no disk")

    broken = type("Broken", (tb.observe.Recorder, Trace), {method: fail})
    with pytest.warns(RuntimeWarning, match="(?s)Broken failed in step .*no disk"):
        attachments = train_traced(2, "bytegrad", lambda group: [broken()], num_steps=2)
    for attachment in attachments:
        assert "Broken stopped in step" in str(attachment.summary())
        assert attachment.summary().figures.num_steps == 2


def test_observers_do_not_change_weights() -> None:
    """Including observers that sample values."""

    class Sampler(tb.observe.Recorder, Trace):
        def samples(self, step: int) -> bool:
            return True

    def weights(name: str, observed: bool) -> list[torch.Tensor]:
        model = build(Tower)
        attachments = train_traced(2, name, lambda group: [Sampler()] if observed else [], model=model)
        optimizers = [optimizer for attachment in attachments for optimizer in attachment.runner.optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    for name in ("bytegrad", "qadam_1bit", "low_precision_decentralized", "diloco"):
        assert all(map(torch.equal, weights(name, True), weights(name, False))), name


def test_without_observers_nothing_is_recorded() -> None:
    (attachment, _) = train_traced(2, "bytegrad", lambda group: [])
    tracer = attachment.runner.tracer
    assert not tracer.is_on
    assert tracer.span("encode") is tracer.span("wait"), "one object that does nothing"
    with pytest.raises(RuntimeError, match=r"without observers nothing is recorded; attach.*observers="):
        attachment.summary()


def test_observers_are_called_one_at_a_time() -> None:
    class Exclusive:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.threads: set[str] = set()

        def on_comm(self, event: tb.observe.CommEvent) -> None:
            assert self.lock.acquire(blocking=False), "called while it is called"
            self.threads.add(threading.current_thread().name)
            self.lock.release()

    observers = [Exclusive(), Exclusive()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_traced(2, "decentralized", lambda group: [observers[group.rank()]], num_steps=10)
    for observer in observers:
        assert len(observer.threads) == 1, "the training thread's, between two steps"


def test_an_observer_given_twice_is_called_once() -> None:
    recorder = tb.observe.Recorder()

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        with tb.attach(ddp, optimizer, "bytegrad", process_group=own, observers=[recorder, recorder]):
            optimizer.step()

    run_ranks(1, body)
    assert [event.phase for event in recorder.events] == ["step"]


def test_training_continues_if_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachments = train_traced(2, "bytegrad", lambda group: [Failing()], num_steps=3)
    assert [attachment.summary().figures.num_steps for attachment in attachments] == [3, 3]
    assert capsys.readouterr().err.count("the observer Failing failed") == 2


def test_a_trace_of_a_user_need_not_override_anything() -> None:
    class Silent(Trace):
        pass

    class Odd:
        """An observer whose attributes have the names of Trace's methods."""

        samples: tuple[int, ...] = ()
        compares_clocks = on_start = on_end = "mine"
        num_heard = 0

        def on_comm(self, event: tb.observe.CommEvent) -> None:
            self.num_heard += 1

    odd = [Odd(), Odd()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_traced(2, "bytegrad", lambda group: [Silent(), odd[group.rank()]], num_steps=2)
    assert min(observer.num_heard for observer in odd) > 10
