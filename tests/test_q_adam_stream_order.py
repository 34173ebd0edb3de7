"""QAdam in stream order, as over NCCL: hosts do not wait for other ranks, and ranks send only what others expect.

The test fakes the streams, and gloo sends the gradients.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import torchbagua as tb
from devices import decide_on_device
from q_adam_life import NUM_STEPS, NUM_WARM, Trainer
from ranks import run_ranks
from test_gpu_lanes import PlayedSideStream, play_streams
from test_host_reads import Reads
from torchbagua.runtime.lane import Job
from torchbagua.transport.communicator import Communicator
from training import Tower, build


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make all communication stream-ordered; the list gets the name of a thread each time that it waits for a lane."""
    waits: list[str] = []
    result = Job.result

    def record_wait(job: Job[Any]) -> Any:
        if not job.is_done():
            waits.append(threading.current_thread().name)
        return result(job)

    play_streams(monkeypatch)
    monkeypatch.setattr(Communicator, "in_stream_order", lambda communicator, device: True)
    monkeypatch.setattr(Job, "result", record_wait)
    return waits


@contextmanager
def training(group: dist.ProcessGroup, model: torch.nn.Module, **arguments: Any) -> Iterator[tuple[Trainer, Any]]:
    trainer = Trainer(group, model)
    runner: Any = trainer.hook(**arguments)
    runner.lane.use_gpu(PlayedSideStream.device)
    try:
        yield trainer, runner
    finally:
        runner.close()


def let_ranks_agree(runner: tb.extend.Runner) -> None:
    """Wait between step and backward, as a forward would, until ranks have agreed on the announcement of the step."""
    runner.lane.submit(lambda: torch.zeros(1)).future().wait()  # the lane agrees before it runs this


@pytest.mark.parametrize("arguments", [{}, {"error_feedback": True}], ids=str)
def test_no_host_waits_for_another_rank_after_the_first_step(
    waits: list[str], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """In the warm-up, at its end and past it; weights are equal to those of a lane that orders all communication.

    A host also does not wait for its GPU, after the warm-up and the first step that sends momenta.
    """
    model = build(Tower)
    decide_on_device(monkeypatch)
    counted = Reads(monkeypatch, torch.device("cpu"))

    def body(group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
        with training(group, model, **arguments) as (trainer, runner):
            for step in range(NUM_STEPS):
                counted.take()
                trainer.step()
                num_reads = counted.take()
                assert num_reads == 0 or step <= NUM_WARM
                let_ranks_agree(runner)
                dist.barrier(group)
                if step == 0:
                    dist.barrier(group)
                    waits.clear()
                    dist.barrier(group)
            return trainer.life.weights

    found = run_ranks(2, body)
    assert not waits

    def train_in_the_lane(group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
        trainer = Trainer(group, model)
        runner = trainer.hook(**arguments)
        for _ in range(NUM_STEPS):
            trainer.step()
        runner.close()
        return trainer.life.weights

    monkeypatch.undo()
    expected = run_ranks(2, train_in_the_lane)
    for own, reference in zip(found, expected, strict=True):
        for weights, reference_weights in zip(own, reference, strict=True):
            assert all(torch.equal(weight, reference_weights[name]) for name, weight in weights.items())


def test_a_state_that_all_ranks_load_is_agreed_on_before_anything_is_sent(waits: list[str]) -> None:
    """The state returns to the warm-up, in which gradients are sent in full precision."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> int:
        with training(group, model) as (trainer, runner):
            for step in range(NUM_STEPS):
                if step == NUM_WARM - 1:
                    state = copy.deepcopy(trainer.optimizer.state_dict())
                trainer.step()
                let_ranks_agree(runner)
            dist.barrier(group)
            waits.clear()
            dist.barrier(group)
            trainer.optimizer.load_state_dict(state)
            for _ in range(NUM_STEPS):
                trainer.step()
                let_ranks_agree(runner)
            return len(trainer.optimizer.num_updates_past_warmup)

    assert run_ranks(2, body) == [len(list(model.parameters()))] * 2
    assert set(waits) <= {"rank 0", "rank 1"}
    assert len(waits) <= 2, "one of each rank, in the first backward"


@pytest.mark.parametrize("loads", [0, 1])
def test_a_state_that_only_one_rank_loads_raises_on_all(waits: list[str], loads: int) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> str:
        with training(group, model) as (trainer, runner):
            for step in range(NUM_STEPS):
                if step == NUM_WARM + 1:
                    state = copy.deepcopy(trainer.optimizer.state_dict())
                trainer.step()
                let_ranks_agree(runner)
            launches: list[object] = []
            launch = runner.lane.launch
            runner.lane.launch = lambda run: (launches.append(run), launch(run))[1]
            if group.rank() == loads:
                trainer.optimizer.load_state_dict(state)
            with pytest.raises(Exception, match="out of step") as caught:  # noqa: PT012  # at the next bucket or step
                for _ in range(2):
                    trainer.step()
            if group.rank() == loads:
                assert len(trainer.life.weights) == NUM_STEPS, "in its first backward"
                assert not launches
            return str(caught.value)

    num_parameters = len(list(model.parameters()))
    numbers = [(NUM_STEPS, NUM_WARM + 1)[rank == loads] * num_parameters for rank in range(2)]
    counted = "updates of parameters past their warm-up"
    for error in run_ranks(2, body):
        assert f"{counted}: rank 0 has {numbers[0]}, rank 1 has {numbers[1]}" in error


def test_steps_without_a_backward_between_them_are_agreed_on(waits: list[str]) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[int]:
        with training(group, model) as (trainer, _):
            for _ in range(NUM_STEPS):
                trainer.step()
                trainer.optimizer.step()
            return trainer.optimizer.num_updates

    assert run_ranks(2, body) == [[2 * NUM_STEPS] * len(list(model.parameters()))] * 2


def test_ranks_end_in_order_after_one_has_run_out_of_data(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That rank announces nothing, since it takes no step, and the other ranks must not wait for it."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # torch does not register the tests' groups
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        with training(group, model) as (trainer, runner), Join([trainer.ddp]):
            for _ in range(NUM_STEPS - 2 * group.rank()):
                trainer.step()
        return bool(runner.lane.has_failed)

    assert run_ranks(2, body) == [False, False]
