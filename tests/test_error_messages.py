"""The error that a user reads if another rank has died: rank, peer, operation, bucket and cause, in one line."""

import copy
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.transport.errors import cause_of
from tracing import algorithm_of
from training import build

SHORT = timedelta(seconds=2)
SIZE = 3
LEAVER = SIZE - 1
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
ADVICE = "Check the logs of the remote worker before reporting an error. GLHF! 🏖️"


@pytest.mark.parametrize(
    ("before", "cause", "after"),
    [
        (
            f"{GLOO}pair.cc:537] ",
            "Read error [127.0.0.1]:2550: Connection reset by peer",
            f". This is typically caused by a remote worker hanging or bugs in the application. {ADVICE}",
        ),
        (
            f"{GLOO}pair.cc:553] ",
            "Connection closed by peer [::1]:508",
            f". This is typically caused by a remote worker crashing. {ADVICE}",
        ),
        (f"{GLOO}unbound_buffer.cc:81] ", "Timed out waiting 2000ms for recv operation to complete", ""),
        (f"[enforce fail at {GLOO[1:]}device.cc:83] ", "ifa != nullptr. No address", ""),
        ("\n", "wait timeout after 2000ms, keys: /x", "\nException raised from doWait at /pytorch/TCPStore.cpp:1\n"),
        ("", "NCCL error, Last error:", "\nLast error:"),
    ],
)
def test_the_cause_is_one_line_without_locations_in_torch_sources(before: str, cause: str, after: str) -> None:
    assert cause_of(RuntimeError(f"{before}{cause}{after}")) == cause


def test_the_cause_in_nccl() -> None:
    text = "NCCL error in: /pytorch/c10d/NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL "
    text += "version 2.27.3\nncclRemoteError: A call failed.\nLast error:\nsocketProgress: gone\n"
    assert cause_of(RuntimeError(text)) == (
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3; socketProgress: gone"
    )
    assert cause_of(RuntimeError("")) == "RuntimeError"


NEIGHBOUR = " (receiving from|sending to) rank [0-2]"


def check_message(error: BaseException, operation: str, whom: str = NEIGHBOUR) -> None:
    """Check the error of an operation, or of the comparison of progress that precedes it in a backward."""
    assert isinstance(error, tb.CommunicationError)
    what = rf"({operation} over the world group failed on rank [01]{whom}"
    what += rf"|the progress with .* over the world group failed on rank [01]{NEIGHBOUR})"
    first = f"torchbagua: {what}: ."
    assert re.match(first, str(error)), error
    assert not re.search(r"\n|/|GLHF|callback", str(error)), error


@pytest.mark.parametrize(
    ("name", "first_failure", "ddp_options", "operation", "whom"),
    [
        ("bytegrad", 2, {}, r"(all_to_all|all_gather) of gradient bucket \d", NEIGHBOUR),
        # With static_graph, DDP calls its hooks when the first backward has ended.
        ("bytegrad", 0, {"static_graph": True}, r"(all_to_all|all_gather) of gradient bucket \d", NEIGHBOUR),
        # The backend does not report which peer died.
        ("gradient_allreduce", 2, {}, r"all_reduce of gradient bucket \d", ""),
        # QAdam's ranks compare their progress before they send a bucket.
        ("qadam", 2, {}, "agreement of the gradients", NEIGHBOUR),
    ],
)
def test_backward_raises_the_original_error(
    name: str, first_failure: int, ddp_options: dict[str, bool], operation: str, whom: str
) -> None:
    """On the remaining ranks, in two steps, after the last rank has closed its groups."""
    model = build(lambda: nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)))
    errors: list[BaseException] = []

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=0.001, **ddp_options)
        algorithm, optimizer = algorithm_of(name, ddp.parameters())
        impl = algorithm.reify(group, timeout=SHORT)
        ddp.register_comm_hook(impl, tb.comm_hook)
        for step in range(first_failure + 2):
            if step == first_failure and group.rank() == LEAVER:
                impl.process_group.close()
                return
            optimizer.zero_grad()
            loss = ddp(torch.ones(3, 30)).sum()
            if step < first_failure:
                loss.backward()
                optimizer.step()
            else:
                with pytest.raises(RuntimeError) as caught:
                    loss.backward()
                errors.append(caught.value)
                ddp._check_reducer_finalized()  # DDP has finished nevertheless: another backward can follow
        impl.close()

    run_ranks(SIZE, body)
    assert len(errors) == 4
    for error in errors:
        check_message(error, operation, whom)


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized", "local_sgd", "async"])
def test_a_weight_algorithm_raises_such_an_error(algorithm: str) -> None:
    errors: list[BaseException] = []

    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own = tb.BaguaProcessGroup(group)
        attachment = tb.attach(module, optimizer, algorithm, process_group=own, timeout=SHORT)
        if group.rank() == LEAVER:
            attachment.runner.process_group.close()
            return

        def train() -> None:
            for _ in range(1000):
                module(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                time.sleep(0.01)

        with pytest.raises(RuntimeError) as caught:
            train()
        errors.append(caught.value)
        attachment.runner.close()

    run_ranks(SIZE, body)
    assert len(errors) == 2
    for error in errors:
        check_message(error, "(agreement|peer_exchange|all_to_all|all_gather) of .*")


def test_a_joined_rank_raises_the_original_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Join, DDP waits for another future, which it has created itself."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # Join asks torch's registry

    def body(group: dist.ProcessGroup) -> BaseException | None:
        ddp = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        impl = tb.ByteGradAlgorithm().reify(group, timeout=SHORT)
        ddp.register_comm_hook(impl, tb.comm_hook)

        def train() -> None:
            with Join([ddp]):
                if group.rank() == 0:
                    loss = ddp(torch.ones(2, 3)).sum()
                    impl.process_group.close()
                    loss.backward()

        with pytest.raises(RuntimeError) as caught:
            train()
        impl.close()
        return caught.value

    closed, joined = run_ranks(2, body)
    assert str(closed) == (
        "torchbagua: the progress with gradient bucket 0 over the world group failed on rank 0: the group is closed"
    )
    check_message(joined, "all_to_all of gradient bucket 0")
