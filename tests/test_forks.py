"""A process that was forked while an algorithm is attached leaves lane and connections alone."""

import contextlib
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua._torch import forget_active_ddp

ALGORITHMS: dict[str, Callable[[], tb.Algorithm]] = {
    "bytegrad": tb.ByteGradAlgorithm,
    "decentralized": tb.DecentralizedAlgorithm,
    "async": lambda: tb.AsyncModelAverageAlgorithm(sync_interval_ms=5, warmup_steps=1),
}
LONGEST_S = 30.0


def in_a_fork(body: Callable[[], None]) -> str:
    """Return "" once `body` has returned in a forked process, or else its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                body()
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    deadline_s = time.monotonic() + LONGEST_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "it hangs"
        time.sleep(0.01)
    with open(reading) as pipe:
        return pipe.read()


def attach(group: dist.ProcessGroup, algorithm: str) -> tuple[Callable[[], None], tb.Attachment]:
    """Return a function that takes a step of an attached DDP, and the attachment."""
    ddp = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    return step, tb.attach(ddp, optimizer, ALGORITHMS[algorithm]())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork(algorithm: str) -> None:
    """Leaving the block, an exception in it and garbage collection have no effect there; communication raises."""

    def body(group: dist.ProcessGroup) -> list[str]:
        step, attachment = attach(group, algorithm)
        found = []

        def leave_the_block(error: Exception | None) -> None:
            with contextlib.suppress(KeyError), attachment:
                if error is not None:
                    raise error
            assert not attachment.is_detached

        def exit_interpreter() -> None:
            attachment.runner.lane._close_at_exit()

        def drop() -> None:
            nonlocal step, attachment
            lane = weakref.ref(attachment.runner.lane)
            del step, attachment
            gc.collect()
            assert lane() is None or algorithm == "async"  # its thread, which does not exist there, refers to it

        def communicate() -> None:
            calls = [step, attachment.detach]
            if algorithm != "bytegrad":
                calls.append(lambda: attachment.averaged_weights().__enter__())
            for call in calls:
                with pytest.raises(RuntimeError, match=r"this is process .* which was forked without its threads"):
                    call()

        for _ in range(3):
            step()
        group.barrier().wait()
        if group.rank() == 0:
            # All threads share it: after forwards of two threads, it may refer to the DDP of this rank.
            forget_active_ddp()
        group.barrier().wait()
        if group.rank() == 0:
            if algorithm != "async":
                attachment.runner.lane.submit(lambda: None).result()  # its thread refers to a job that it runs
                time.sleep(0.1)
            gc.collect()  # groups of earlier tests, whose destruction in a forked process would hang, as torch's does
            leaving = (partial(leave_the_block, error) for error in (None, KeyError()))
            for child in (communicate, exit_interpreter, *leaving, drop):
                found.append(in_a_fork(child))
        step()
        attachment.detach()
        return found

    assert run_ranks(2, body)[0] == [""] * 5
