"""The lane: order, errors, and threads that end."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from test_gpu_lanes import PlayedSideStream, play_streams, pretend_group
from torchbagua import _concurrency
from torchbagua.runtime import lane as lane_module
from torchbagua.runtime.lane import Lane


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def wait_until_gone(name: str) -> None:
    deadline = time.monotonic() + 5
    while threads_named(name):
        assert time.monotonic() < deadline, f"the thread {name} stays behind"
        time.sleep(0.01)


def test_jobs_run_in_order_on_one_thread_and_close_finishes_them() -> None:
    lane = Lane("order", on_failure=lambda: None)
    assert not threads_named("order"), "the thread starts with the first job"
    seen, steps = list[tuple[int, str]](), list[str]()
    jobs = [lane.submit(lambda i=i: seen.append((i, threading.current_thread().name)) or i) for i in range(100)]
    overlapping = [lane.submit_overlapping(Steps(name, steps)) for name in "abcd"]
    lane.close()
    assert [job.future().wait() for job in jobs] == list(range(100))
    assert seen == [(i, "order") for i in range(100)]
    assert [job.result() for job in overlapping] == list("abcd")
    assert steps.count("d ends") == 1
    assert not threads_named("order")
    lane.close()
    with pytest.raises(RuntimeError, match="order is closed"):
        lane.submit(lambda: None).future()


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_failure_reaches_earlier_jobs_whose_work_is_under_way(
    monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    play_streams(monkeypatch)
    lane = Lane("launching", on_failure=lambda: None, group=pretend_group(poll=lambda: is_under_way))
    lane.use_gpu(PlayedSideStream.device)
    launched, failed = lane.submit(lambda: "launched"), lane.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    if is_under_way:
        with pytest.raises(ZeroDivisionError):
            launched.result()
    else:
        assert launched.result() == "launched"
    lane.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("closes", [True, False])
def test_failure_reaches_every_later_job_and_ends_the_thread(closes: bool) -> None:
    """Also an error that is its own cause, and if on_failure raises."""
    gate, ran = threading.Event(), list[str]()

    def on_failure() -> None:
        ran.append("on_failure")
        if not closes:
            raise OSError("cannot close")

    def fail() -> None:
        gate.wait()
        error = ConnectionError("peer 3 is gone")
        raise error from error

    lane = Lane("failing", on_failure=on_failure)
    futures = [lane.submit(fail).future(), *([lane.submit(lambda: ran.append("queued")).future()] if closes else [])]
    gate.set()
    wait_until_gone("failing")
    if closes:
        futures.append(lane.submit(lambda: ran.append("late")).future())
    for future in futures:
        with pytest.raises(RuntimeError, match="ConnectionError: peer 3 is gone"):
            future.wait()
    assert ran == ["on_failure"]
    lane.close()


@pytest.mark.parametrize("attempt", range(20))
def test_nothing_is_queued_behind_the_stop(attempt: int) -> None:
    """A job that submit has accepted runs, even if another thread closes the lane; later jobs are refused."""
    lane, start = Lane("racing", on_failure=lambda: None), threading.Barrier(3)
    accepted, refused = [], []

    def submit() -> None:
        start.wait()
        for _ in range(20):
            try:
                accepted.append(lane.submit(lambda: 1).future())
            except RuntimeError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(2) as threads:
        threads.submit(submit), threads.submit(submit)
        start.wait()
        lane.close()
    assert len(accepted) + len(refused) == 40
    assert all(future.wait() == 1 for future in accepted)
    assert all("racing is closed" in text for text in refused)
    assert not threads_named("racing")


def test_close_abandons_a_job_if_a_signal_handler_has_ended_a_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may have caught the handler's exception, and end in order."""
    monkeypatch.setattr(lane_module, "_LAST_JOB_S", 0.1)
    is_abandoned = threading.Event()
    lane = Lane("interrupted", on_failure=lambda: None, group=pretend_group(abandon=is_abandoned.set))
    job = lane.submit(lambda: is_abandoned.wait(5))

    def interrupt(done: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_concurrency, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.result()
    lane.close()
    assert job.result(), "the job has waited in vain"
    assert not threads_named("interrupted")


@dataclass
class Steps:
    """Records its steps: begins, yields twice, and ends."""

    name: str
    seen: list[str]
    may: bool = True
    fails_at: str = ""

    def may_begin(self) -> bool:
        return self.may

    def run_overlapping(self) -> Generator[None, None, str]:
        try:
            for step in ("begins", "waits", "ends"):
                self.seen.append(f"{self.name} {step}")
                if self.fails_at == step:
                    raise ValueError(f"{self.name} failed")
                if step != "ends":
                    yield
        except GeneratorExit:
            self.seen.append(f"{self.name} is closed")
            raise
        return self.name


def run_steps(*sources: Steps) -> list[str]:
    """Return the result or the error of each job; all jobs are queued before the first runs."""
    lane, gate, outcomes = Lane("steps", on_failure=lambda: None), threading.Event(), []
    lane.submit(gate.wait)
    jobs = [lane.submit_overlapping(source) for source in sources]
    gate.set()
    for job in jobs:
        try:
            outcomes.append(job.result())
        except ValueError as error:
            outcomes.append(str(error))
    lane.close()
    assert not threads_named("steps")
    return outcomes


def test_the_next_job_begins_while_a_job_waits_and_continues_after_it() -> None:
    seen: list[str] = []
    assert run_steps(Steps("a", seen), Steps("b", seen), Steps("c", seen, may=False)) == ["a", "b", "c"]
    assert seen == [
        *("a begins", "a waits", "b begins", "a ends"),
        *("b waits", "b ends"),
        *("c begins", "c waits", "c ends"),
    ]


@pytest.mark.parametrize(("name", "fails_at"), [("a", "ends"), ("b", "begins")])
def test_a_failure_closes_the_jobs_that_have_begun(name: str, fails_at: str) -> None:
    seen: list[str] = []
    jobs = [Steps(letter, seen, fails_at=fails_at if letter == name else "") for letter in "abc"]
    assert run_steps(*jobs) == [f"{name} failed"] * 3
    other_name = "b" if name == "a" else "a"
    assert f"{other_name} is closed" in seen
    assert "c begins" not in seen
