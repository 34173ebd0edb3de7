"""A gradient algorithm from one function. test_error_feedback.py tests its residuals."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms import base
from torchbagua.testing import check_algorithm
from torchbagua.testing.simulation import Subject, check
from training import Tower, build, train


def in_full_precision(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    group.all_reduce(flat, average=True)


def in_halves(flat: torch.Tensor) -> torch.Tensor:
    """Return multiples of 1/2. An element at a time, since a resumed run has other buckets in its first step."""
    return flat.mul(2).round().div(2)


def failing(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    raise ArithmeticError("it does not add up")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    tb.extend.mean("exact")(in_full_precision)
    tb.extend.mean("half", error_feedback=in_halves, description="in halves")(in_full_precision)
    tb.extend.mean("failing")(failing)
    tb.extend.mean("anonymous")(lambda flat, group: None)


def test_a_function_is_an_algorithm() -> None:
    """Bitwise the package's own mean in rank order."""
    model, in_order = build(Tower), tb.GradientAllReduceAlgorithm(in_rank_order=True)
    own, expected = (
        run_ranks(2, lambda group, algorithm=algorithm: train(group, model, algorithm, bucket_cap_mb=0.01).weights)
        for algorithm in (tb.Algorithm.init("exact"), in_order)
    )
    for weights, reference in zip(own, expected, strict=True):
        assert all(torch.equal(weight, reference[name]) for name, weight in weights.items())
    assert tb.available_algorithms()["half"] == "in halves"


def test_a_function_keeps_the_contract_of_algorithms() -> None:
    """Residuals are resumed too, into the buckets of a new DDP."""
    check_algorithm(Subject(lambda optimizer: base.get("half")()))


def attach_and_backward(group: dist.ProcessGroup, name: str) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    with tb.attach(ddp, torch.optim.SGD(ddp.parameters()), name):
        ddp(torch.ones(1, 3)).sum().backward()


def test_an_error_names_the_function() -> None:
    def body(group: dist.ProcessGroup) -> str:
        with pytest.raises(RuntimeError) as raised:
            attach_and_backward(group, "failing")
        return str(raised.value)

    # If the other rank fails first, a rank may see only that its connection is closed.
    pattern = r"failing.*gradient bucket 0.*it does not add up"
    assert any(re.search(pattern, message, re.DOTALL) for message in run_ranks(2, body))


def test_ranks_cannot_compare_a_lambda() -> None:
    with pytest.raises(TypeError, match="a function that can be imported by its name"):
        run_ranks(1, partial(attach_and_backward, name="anonymous"))


@pytest.mark.usefixtures("on_one_core")
@pytest.mark.filterwarnings("ignore")
def test_simulation() -> None:
    check(Subject(lambda optimizer: base.get("half")()), seeds=range(8))
