"""Which ranks are connected, how many groups an attachment opens, and what happens if a peer does not arrive."""

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.topology import Ring
from torchbagua.transport import gloo
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.gloo import Connections, GlooTransport

SHORT = timedelta(seconds=1)


def connections_of(communicator: Communicator) -> Connections:
    transport = communicator._transports["cpu"]
    assert isinstance(transport, GlooTransport)
    return transport.connections


@pytest.fixture(autouse=True)
def connect_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect ranks on demand, as in a group of more ranks than a test can have."""
    monkeypatch.setattr(gloo, "MOST_CONNECTED_AT_ONCE", 1)


def test_a_rank_connects_to_the_peers_it_communicates_with() -> None:
    size = 8

    def body(group: dist.ProcessGroup) -> list[set[int]]:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        own.open()
        opened = connections_of(own.world)
        found = [set(opened.links)]
        broadcast_tensors(own.world, [torch.zeros(3), torch.empty(0)], "a test")
        assert len(opened.links) <= (size - 1).bit_length()
        all_reduce_max(own.world, [rank], "a test")
        found.append(set(opened.links))
        flat, got = torch.full((4,), float(rank)), torch.empty(4)
        own.exchange({(rank + 3) % size: flat}, {(rank - 3) % size: got})
        assert got.tolist() == [(rank - 3) % size] * 4
        found.append(set(opened.links))
        assert opened.mesh is None
        assert own.all_reduce(flat).tolist() == [28.0] * 4
        own.exchange({(rank + 3) % size: flat}, {(rank - 3) % size: got})
        assert opened.mesh is not None
        found.append(set(opened.links))
        return found

    for rank, found in enumerate(run_ranks(size, body)):
        powers = {(rank + distance) % size for distance in (1, 2, 4, -1, -2, -4)}
        third = {(rank + 3) % size, (rank - 3) % size}
        assert found == [set(), powers, powers | third, powers | third]


@pytest.mark.parametrize("algorithm", ["ring", "low_precision", "shift_one"])
def test_sockets_of_an_attachment(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring needs only the sockets to its neighbors, and to the ranks with which a rank agrees."""
    rounds = importlib.import_module("torchbagua.collectives.neighbourhood_mean")  # not the package's function
    monkeypatch.setattr(rounds, "_MAX_CONNECTED_ROUNDS", 3)  # fewer than shift_one's
    algorithms = {
        "ring": tb.DecentralizedAlgorithm(peer_selection_mode=Ring()),
        "low_precision": tb.LowPrecisionDecentralizedAlgorithm(),
        "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    }

    def body(group: dist.ProcessGroup) -> None:
        module, own = nn.Linear(4, 4), tb.BaguaProcessGroup(group)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, algorithms[algorithm], process_group=own) as attachment:
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            opened = connections_of(attachment.runner.process_group.world)
            assert (opened.mesh is not None) == (algorithm == "shift_one")
            assert len(opened.links) <= 2 * (own.size - 1).bit_length()

    run_ranks(8, body)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_peer_is_named_in_time(missing: int) -> None:
    """True for either of two ranks that wait for each other; a rank that arrives later finds the group closed."""
    left = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group, timeout=SHORT)
        own.open()
        if group.rank() == missing:
            left.wait(30)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(tb.CommunicationError) as caught:
                all_reduce_max(own.world, [0], "numbers")
        assert time.monotonic() < start + 2.5
        if group.rank() != missing:
            left.wait(30)
        return str(caught.value)

    texts = run_ranks(3, body)
    assert "it gave up waiting for this rank or another rank to connect" in texts.pop(missing)
    for rank, text in zip([rank for rank in range(3) if rank != missing], texts, strict=True):
        assert f"agreement of numbers over the world group failed on rank {rank} connecting to rank" in text
    assert any(f"to rank {missing}: timed out after 1 s waiting for it to connect" in text for text in texts), texts


def test_a_rank_missing_from_an_all_reduce_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT)
        own.open()
        if group.rank() != 1:
            with pytest.raises(
                tb.CommunicationError, match=r"world group of .* on rank \d within 1 s.* ranks \[1\] did not"
            ):
                own.all_reduce(torch.ones(3))

    run_ranks(3, body)


def test_ranks_that_receive_only_and_send_only() -> None:
    """A rank does not wait for a peer if it neither sends to it nor receives from it."""

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group, timeout=SHORT), group.rank()
        own.open()
        got = torch.zeros(2)
        sends = {1: torch.ones(2)} if rank == 0 else {}
        receives = {0: got} if rank == 1 else {}
        for _ in range(2):
            own.exchange(sends, receives)
        assert got.tolist() == ([1.0, 1.0] if rank == 1 else [0.0, 0.0])
        assert set(connections_of(own.world).links) == ({1} if rank == 0 else {0} if rank == 1 else set())

    run_ranks(4, body)


def test_bytes_that_are_not_received_do_not_block_closing() -> None:
    """Closing a group that gloo itself connects (`lazy_init`) freezes the process (torch 2.13)."""

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        peer = 1 - rank
        own.world.connect([peer], "a test")
        long = torch.zeros(1_000_000)
        if rank == 0:
            own.world.post("receiving from", peer, long, tag=0, purpose="a test")
        else:
            own.world.post("sending to", peer, long, tag=0, purpose="a test")
            time.sleep(0.2)
        own.close()

    run_ranks(2, body)


def test_groups_connect_all_ranks_despite_torch_gloo_lazy_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "MOST_CONNECTED_AT_ONCE", 32)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        own.open()
        assert connections_of(own.world).mesh is not None
        assert own.all_reduce(torch.ones(3)).tolist() == [3.0] * 3

    run_ranks(3, body)


@pytest.mark.parametrize("has_mesh", [True, False])
def test_abandoned_connections_end_the_waits_of_both_ranks(has_mesh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of another thread ends at once, although gloo cannot abort it, and the peer's error names this rank."""
    monkeypatch.setattr(gloo, "MOST_CONNECTED_AT_ONCE", 32 if has_mesh else 1)

    def body(group: dist.ProcessGroup) -> str:
        own, peer = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=60)), 1 - group.rank()
        own.open()
        all_reduce_max(own.world, [0], "a test")

        def receive() -> str:
            own.world.post("receiving from", peer, torch.empty(3), tag=0, purpose="a test")
            with pytest.raises(tb.CommunicationError) as caught:
                own.world.wait("receiving from", peer, tag=0, purpose="a test")
            return str(caught.value)

        with ThreadPoolExecutor(1) as thread:
            error = thread.submit(receive)
            time.sleep(0.3)
            if group.rank() == 0:
                own.private.abandon()
            return error.result(20)

    expected = "a test over the world group failed on rank 1 receiving from rank 0: Connection closed by peer"
    assert expected in run_ranks(2, body)[1]


def test_a_timeout_names_the_argument_to_raise() -> None:
    """The rank that does not communicate may only be busy."""
    has_raised = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT)
        own.open()
        all_reduce_max(own.world, [0], "a test")
        if group.rank() == 1:
            with pytest.raises(tb.CommunicationError) as caught:
                all_reduce_max(own.world, [0], "a test")
            expected = (
                "rank 0 has not communicated for 1 s: if it is only busy, as while it evaluates or saves alone, pass"
            )
            assert f"{expected} a longer attach(..., timeout=timedelta(...)), or reify(" in str(caught.value)
            has_raised.set()
        assert has_raised.wait(30)

    run_ranks(2, body)
