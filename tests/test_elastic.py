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
from elastic_trials import ALGORITHMS, TIMEOUT, ElasticTrial, Event, loss_of, make_training, run_trial
from ranks import on_each_rank
from torchbagua import _concurrency, elastic
from torchbagua.elastic import generations, members
from torchbagua.testing.simulation import Rank, Simulation
from torchbagua.testing.simulation.elastic import PostOffice, SimulatedMachine

pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.filterwarnings("ignore:torchbagua")]


@pytest.mark.parametrize("seed", range(8))
def test_a_training_goes_on_with_the_ranks_that_are_there(seed: int) -> None:
    """Never two memberships of one generation; bitwise the result of one process; every sample in one kept step."""
    assert run_trial(ElasticTrial.drawn(seed)) == []


def test_progress_between_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many changes are no reason to end, if there are steps between them."""
    monkeypatch.setattr(generations, "_MOST_BARREN", 2)
    leaves = [Event("leave", process, 0.3 + 0.3 * process) for process in range(3)]
    assert run_trial(ElasticTrial(0, 4, events=leaves)) == []


@pytest.mark.parametrize("name", ["bytegrad", "topk", "powersgd", "diloco"])
def test_what_an_algorithm_keeps_when_a_rank_dies(name: str) -> None:
    """What it owes to the others, and what is equal on all ranks, but not the residuals of the means."""
    simulation, office, compared = Simulation(3, 0), PostOffice(), list[str]()
    summaries: list[tb.observe.Summary] = []

    def body(rank: Rank) -> None:
        model, optimizer, algorithm = make_training(ALGORITHMS[name])
        before: dict[str, Any] = {}

        def train(run: elastic.Run) -> None:
            nonlocal before
            after = tensors_of(run.attachment)
            for key in before:
                assert torch.equal(after[key], before[key] * (key[0] != "mean")), key
                if before[key].any():
                    compared.append(key[0])
            while run.step < 20:
                run.boundary()
                before = tensors_of(run.attachment)
                if rank.number == 1 and run.step == 10:
                    simulation.kill(1)
                _concurrency.sleep(0.1)
                optimizer.zero_grad()
                loss_of(run.module, torch.tensor([rank.number + 3 * run.step])).backward()
                optimizer.step()

        def observers() -> list[tb.observe.Summary]:
            summaries.append(tb.observe.Summary())
            return summaries[-1:]

        machine = SimulatedMachine(rank, office, range(3))
        arguments = model, [optimizer], algorithm, {}, None, TIMEOUT
        generations.Training(machine, *arguments, observers=observers).run(train, None)

    assert [outcome.error for outcome in simulation.run(body)] == [None] * 3
    kinds = {"bytegrad": {"sent", "mean"}, "topk": {"sent", "velocity", "mean"}, "powersgd": {"error", "factor"}}
    assert {*compared} == kinds.get(name, {"theta", "sent", "mean"})
    line = r"rank 0: the change of the membership before took 0.\d+ s: notice 0.\d+ s, agree 0.\d+ s, open .*, share "
    assert [bool(re.search(line, str(summary))) for summary in summaries if summary.run.rank == 0] == [False, True]


def tensors_of(attachment: tb.Attachment) -> dict[tuple[str, str], torch.Tensor]:
    impl = attachment.state_dict()["impl"]
    every = {**impl, **impl.get("residuals", {})}
    kinds = every.keys() & {"sent", "mean", "velocity", "error", "factor", "theta"}
    return {(kind, parameter): tensor.clone() for kind in kinds for parameter, tensor in every[kind].items()}


def everybody(membership: members.Membership, part: Any) -> bool:
    return True


def nothing(*arguments: Any) -> int:
    return 0


def forgets(store: dist.Store, generation: int, change: Any, update: Any = members.update_register) -> Any:
    return update(store, generation, lambda register: change(members.Register()))


def goes_on(changes: members.Changes, base: members.Membership, agree: Any = members.Changes.agree) -> Any:
    try:
        return agree(changes, base)
    except elastic.EvictedError:
        return members.Membership(base.generation + 1, (changes.mailboxes.own,))


@pytest.mark.parametrize(
    ("seed", "patched", "name", "bug"),
    [
        (18, members.Membership, "is_quorum", everybody),
        (684, members, "update_register", forgets),
        (34, members.Changes, "agree", goes_on),
        (11, elastic.Sampler, "commit", nothing),
        (11, elastic.Sampler, "begin", lambda sampler, rank, size: vars(sampler).update(_rank=rank, _size=size)),
    ],
    ids=["a forgotten quorum", "a second vote", "a zombie's step", "samples twice", "samples never"],
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
