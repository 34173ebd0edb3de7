"""Weights averaged between ranks with the same shards are bitwise equal to whole modules' averages; refusals."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchbagua as tb
import warm_python
from ranks import init_default_group
from sharded_module import assert_trains_as_without, optimizer_of, sharded
from sharded_weights_rank import CASES, CHECKS


def run(script: str, *arguments: str, ranks: int) -> list[str]:
    """Run cases in real processes: torch finds a mesh by the names of its groups, which threads of a process share."""
    program = Path(__file__).with_name(script)
    printed = warm_python.run_ranks(program, *arguments, ranks=ranks, timeout_s=300).stdout
    return [line for line in printed.splitlines() if line.startswith("right: ")]


def split_cases(names: list[str]) -> list[list[str]]:
    """Return batches of cases: a case takes seconds on two cores."""
    return [names[at : at + 5] for at in range(0, len(names), 5)]


@pytest.mark.slow
@pytest.mark.parametrize("names", split_cases([*CASES, *CHECKS]))
def test_shards_are_averaged_as_whole_weights(names: list[str]) -> None:
    assert run("sharded_weights_rank.py", *names, ranks=4) == [f"right: {name}" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bytegrad", "diloco"])
def test_checkpoint_of_four_ranks_is_loaded_by_two(name: str, tmp_path: Path) -> None:
    assert run("sharded_checkpoint_rank.py", "save", name, str(tmp_path), ranks=4) == ["right: save"]
    assert run("sharded_checkpoint_rank.py", "load", name, str(tmp_path), ranks=2) == ["right: load"]


@pytest.fixture(autouse=True)
def default_group() -> None:
    init_default_group()


NAMES = ["decentralized", "low_precision_decentralized", "async", "diloco", "local_sgd"]


@pytest.mark.parametrize("name", NAMES)
def test_replicate_group_must_be_given(name: str) -> None:
    module = sharded()
    with pytest.raises(ValueError, match=r"Algorithm averages weights .* replicate_group=.* or CompressedAllReduce"):
        tb.attach(module, optimizer_of(module), name)


@pytest.mark.parametrize("name", ["low_precision_decentralized", "async", "diloco"])
def test_one_replica_trains_as_without(name: str) -> None:
    assert_trains_as_without(name, replicate_group=dist.group.WORLD)


def test_evaluation_before_attach_leaves_nothing_gathered() -> None:
    """A root module keeps its parameters gathered after a forward, and then lists the gathered parameters."""
    module = fully_shard(nn.Linear(4, 2))
    optimizer = optimizer_of(module)
    with torch.no_grad():
        module(torch.randn(8, 4))
    assert type(module.weight) is nn.Parameter
    with tb.attach(module, optimizer, "bytegrad"):
        assert isinstance(module.weight, torch.distributed.tensor.DTensor)
