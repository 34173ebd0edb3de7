"""Requests to a store that does not answer, and requests that a signal handler interrupts."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import torchbagua as tb
import warm_python
from alarms import alarm_after
from torchbagua.transport import store_requests
from torchbagua.transport.gloo import gloo_group
from torchbagua.transport.store_requests import SilentStoreError, StoreRequests

SHORT = timedelta(seconds=0.5)


HOST = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[warm_python.Fork]:
    """A process with a store, which may be stopped."""
    with warm_python.started(["-c", HOST], out=tmp_path / "port", ends_whole=True) as process:
        deadline_s = time.monotonic() + 60
        while not process.printed().endswith("\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield process
        process.send_signal(signal.SIGKILL)


def client_of(host: warm_python.Fork) -> dist.Store:
    return dist.TCPStore("127.0.0.1", int(host.printed()), is_master=False, wait_for_workers=False)


REQUESTS: dict[str, Callable[[StoreRequests], object]] = {
    "add": lambda store: store.add("key", 1),
    "check": lambda store: store.check(["key"]),
    "get": lambda store: store.get("key"),
    "set_first": lambda store: store.set_first("key", "text"),
    "wait": lambda store: store.wait(["key"], SHORT),
    "clone": lambda store: store.clone("ready"),
    "gloo": lambda store: store.open_group(lambda raw: gloo_group(raw, 0, 2, SHORT)),
}


def test_a_stopped_store_is_reported_in_time(host: warm_python.Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request raises, and so does the construction of a group, before and while it waits for another rank."""
    monkeypatch.setattr(store_requests, "_ANSWER_S", 0.5)
    stores = {name: StoreRequests(client_of(host), SHORT) for name in REQUESTS}
    client_of_stopped = client_of(host)
    groups = {when: dist.ProcessGroup(client_of(host), 0, 2) for when in ("before", "later")}

    def error_of(request: Callable[[], object]) -> Exception:
        start_s = time.monotonic()
        with pytest.raises((SilentStoreError, tb.CommunicationError)) as caught:
            request()
        assert time.monotonic() < start_s + 10
        return caught.value

    def construct(when: str) -> tb.BaguaProcessGroup:
        return tb.BaguaProcessGroup(groups[when], timeout=timedelta(seconds=2 if when == "later" else 0.5))

    with ThreadPoolExecutor(len(REQUESTS) + 2) as threads:
        of_groups = [threads.submit(error_of, partial(construct, "later"))]
        time.sleep(0.5)  # it now waits for rank 1
        host.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        of_stores = [threads.submit(error_of, partial(request, stores[name])) for name, request in REQUESTS.items()]
        of_groups.append(threads.submit(error_of, partial(construct, "before")))
    for error in of_groups:
        assert "comparing settings failed on rank 0: the store of the process group did not" in str(error.result())
        assert "check the process that hosts it, usually rank 0 or the launcher" in str(error.result())
    assert all(isinstance(error.result(), SilentStoreError) for error in of_stores)
    start_s = time.monotonic()
    patient = StoreRequests(client_of_stopped, timedelta(seconds=60))
    StoreRequests(client_of_stopped, timedelta(seconds=60)).leave("key", "text")  # soon, whatever the timeout
    assert StoreRequests(client_of_stopped, timedelta(seconds=60)).peek("key") is None
    with pytest.raises(SilentStoreError, match=r"within 0\.1 s"):
        patient.ask(lambda store: store.add("key", 1), 0.1)
    with pytest.raises(SilentStoreError):
        patient.add("key", 1)
    assert time.monotonic() < start_s + 30  # at once, since the first request is still pending
    host.send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 20
    while True:  # it answers again
        try:
            assert stores["check"].add("another key", 1) == 1
            break
        except SilentStoreError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_a_request_after_an_interrupted_one_does_not_wait_for_it(kind: str, tmp_path: Path) -> None:
    """A TCPStore serves the requests of a connection one after the other."""
    if kind == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store: dist.Store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    else:
        store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    requests = StoreRequests(dist.PrefixStore("prefix", store), timedelta(seconds=30))
    start_s = time.monotonic()
    with alarm_after(0.1, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        requests.wait(["key"], timedelta(seconds=8))
    assert requests.set_first("key", "text") == "text"  # which ends the wait too
    assert time.monotonic() < start_s + 5
    assert requests.get("key") == "text"


def test_the_error_of_a_request_is_raised() -> None:
    requests = StoreRequests(dist.HashStore(), timedelta(seconds=30))
    with pytest.raises(dist.DistStoreError):
        requests.wait(["key"], timedelta(milliseconds=10))
    requests.write_text(["a", "b"], "text")
    assert requests.read_texts(["a", "b"]) == ["text", "text"]
    requests.announce("is here", 1)
    assert requests.missing_ranks("is here", 3) == [0, 2]


def test_a_text_that_a_rank_leaves_does_not_replace_another() -> None:
    """The first reason of a failure stays, and so does a verdict that others read."""
    requests = StoreRequests(dist.HashStore(), timedelta(seconds=2))
    requests.leave("reason", "the first")
    requests.leave("reason", "a later one")
    assert requests.get("reason") == "the first"
