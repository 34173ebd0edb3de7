"""Elastic training: in the simulation with all that may happen, and in real processes of which one is killed."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import programs
import torchbagua as tb
from elastic_trials import ElasticTrial, run_trial
from ranks import on_each_rank
from torchbagua import elastic
from torchbagua.elastic import members

pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.filterwarnings("ignore:torchbagua")]


@pytest.mark.parametrize("seed", range(8))
def test_a_training_goes_on_with_the_ranks_that_are_there(seed: int) -> None:
    """Never two memberships of one generation; bitwise the result of one process; every sample in one kept step."""
    assert run_trial(ElasticTrial.drawn(seed)) == []


def everybody(membership: members.Membership, part: Any) -> bool:
    return True


def nothing(*arguments: Any) -> int:
    return 0


@pytest.mark.parametrize(
    ("seed", "patched", "name", "bug"),
    [
        (10, members.Membership, "is_quorum", everybody),
        (0, elastic.Sampler, "commit", nothing),
        (9, elastic.Sampler, "begin", lambda sampler, rank, size: vars(sampler).update(_rank=rank, _size=size)),
    ],
    ids=["a forgotten quorum", "samples twice", "samples never"],
)
def test_bugs_that_the_trials_find(
    seed: int, patched: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patched, name, bug)
    assert run_trial(ElasticTrial.drawn(seed)) != []


def train(algorithm: str) -> None:
    """The program of a rank. Rank 0 kills itself in its 20th step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(200, 16), torch.randn(200, 1))
    sampler = elastic.Sampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)

    def body(run: elastic.Run) -> None:
        print(f"generation {run.generation}: {run.size} ranks from step {run.step}", flush=True)
        while run.step < 40:
            for x, y in run.batches(loader):
                if os.environ["RANK"] == "0" and run.step == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                (run.module(x) - y).square().mean().backward()
                optimizer.step()
                if run.step >= 40:
                    break

    elastic.run(body, model, optimizer, algorithm, sampler=sampler)
    print("weights", sum(float(parameter.detach().double().sum()) for parameter in model.parameters()), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_the_survivors_of_a_killed_rank_train_on(algorithm: str) -> None:
    """Rank 0 too, whose process the others met at."""
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "3",
    }
    command, options = [sys.executable, __file__, algorithm], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(programs.started(command, env={**environment, "RANK": str(rank)}, **options))
            for rank in range(3)
        ]
        texts = [process.communicate(timeout=100) for process in processes]
    first, *others = processes
    assert first.returncode == -signal.SIGKILL
    for process, (out, err) in zip(others, texts[1:], strict=True):
        assert process.returncode == 0, err
        first_line, second_line = out.splitlines()[:2]
        assert first_line == "generation 0: 3 ranks from step 0"
        # With averaged weights, the others may finish the step without rank 0.
        assert re.fullmatch("generation 1: 2 ranks from step 2[01]", second_line)
    assert re.search(r"generation 1: 3 to 2 ranks \(lost rank 0 on 127.0.0.1\), step 2[01], \d+\.\d s", texts[1][1])
    assert texts[1][0].splitlines()[-1] == texts[2][0].splitlines()[-1]


@on_each_rank(1)
def test_arguments_that_do_not_fit(group: dist.ProcessGroup) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "without DistributedDataParallel", {"model": DistributedDataParallel(model, process_group=group)}),
        (ValueError, "whole on every rank", {"optimizers": zero_redundancy(model)}),
        (ValueError, "model must be on the CPU", {"model": torch.nn.Linear(2, 1, device="meta")}),
        (
            ValueError,
            '"shift_one" needs an even',
            {"algorithm": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one")},
        ),
        (TypeError, r"state\['ema'\] must have state_dict", {"state": {"ema": 3}}),
        (TypeError, "sampler must be an elastic.Sampler, got list", {"sampler": [1]}),
        (ValueError, "timeout must be a positive", {"timeout": timedelta(0)}),
        (ValueError, "min_ranks must be at least 1, got 0", {"min_ranks": 0}),
        (ValueError, 'quorum must be "majority" or "any"', {"quorum": "all"}),
    ]
    for error, message, argument in refused:
        arguments = {"model": model, "optimizers": optimizer, "algorithm": "bytegrad", **argument}
        with pytest.raises(error, match=message):
            elastic.run(lambda run: None, **arguments)


def zero_redundancy(model: torch.nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


if __name__ == "__main__":
    train(sys.argv[1])
