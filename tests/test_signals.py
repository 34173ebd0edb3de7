"""Signal handlers run while this rank waits for another one; a handler that raises ends the attachment in order."""

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from alarms import alarm_after
from ranks import gloo_group, init_default_group
from torchbagua.runtime import lane

LONG = timedelta(seconds=60)
ALGORITHMS: dict[str, tb.Algorithm] = {
    "bytegrad": tb.ByteGradAlgorithm(),
    "gradient_allreduce": tb.GradientAllReduceAlgorithm(),
    "decentralized": tb.DecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(2),
}
# How long a rank whose handler does not run would wait.
PATIENCE_S = 20.0


class Leaving(BaseException):
    """A signal handler raised, as sys.exit does."""


def alarm_soon() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def nothing() -> None:
    return


def run_two(slow: Callable[[dist.ProcessGroup], None], waiting: Callable[[dist.ProcessGroup], None]) -> list[Exception]:
    """Run rank 0 on a thread, and rank 1, which waits for it, on the main thread. Return the error of rank 0."""
    init_default_group()
    store, errors = dist.HashStore(), list[Exception]()
    groups = dict.fromkeys(range(2), None)

    def run_slow() -> None:
        groups[0] = gloo_group(store, 0, 2)
        try:
            slow(groups[0])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run_slow, daemon=True)
    thread.start()
    groups[1] = gloo_group(store, 1, 2)
    waiting(groups[1])
    thread.join(60)
    assert not thread.is_alive()
    return errors


def train(
    group: dist.ProcessGroup, algorithm: str, before_last: Callable[[], None], before_end: Callable[[], None]
) -> None:
    """Take three steps and detach, and call functions before the last step and before `detach`."""
    bucket_cap_mb = 1e-5 if algorithm == "bytegrad" else 25.0  # several buckets, or one
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), process_group=group, bucket_cap_mb=bucket_cap_mb
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with tb.attach(ddp, optimizer, ALGORITHMS[algorithm], timeout=LONG) as attachment:
        for step in range(4):
            if step == 3:
                before_last()
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        before_end()
        attachment.detach()


@pytest.mark.parametrize("at_end", [False, True], ids=["step", "detach"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_handler_runs_while_the_rank_waits(algorithm: str, at_end: bool) -> None:
    """In backward, in `optimizer.step` and in `detach`: the other rank comes only once the handler has run."""
    has_run = threading.Event()
    in_time: list[bool] = []

    def be_late() -> None:
        in_time.append(has_run.wait(PATIENCE_S))

    def body_of(late: Callable[[], None]) -> Callable[[dist.ProcessGroup], None]:
        return lambda group: train(group, algorithm, *((nothing, late) if at_end else (late, nothing)))

    with alarm_after(0, has_run.set):
        assert run_two(body_of(be_late), body_of(alarm_soon)) == []
    assert in_time == [True]


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_allreduce", "diloco"])
def test_a_handler_that_raises_ends_the_attachment(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank leaves at once, without a thread, and the error of the other rank names it."""
    monkeypatch.setattr(lane, "_LAST_JOB_S", 1.0)
    others = set(threading.enumerate())  # of earlier tests
    has_left = threading.Event()

    def leave() -> None:
        raise Leaving

    def be_late() -> None:
        assert has_left.wait(PATIENCE_S)

    def waiting(group: dist.ProcessGroup) -> None:
        with pytest.raises(Leaving):
            train(group, algorithm, alarm_soon, nothing)
        has_left.set()

    start_s = time.monotonic()
    with alarm_after(0, leave):
        (error,) = run_two(lambda group: train(group, algorithm, be_late, nothing), waiting)
    assert time.monotonic() < start_s + PATIENCE_S
    assert isinstance(error, RuntimeError)
    peer = "" if algorithm == "gradient_allreduce" else " receiving from rank 1"
    assert f"over the world group failed on rank 0{peer}" in str(error)
    assert not [thread for thread in threading.enumerate() if "lane" in thread.name and thread not in others]
