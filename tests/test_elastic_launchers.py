"""Elastic training with launchers: one rank program, of which one rank is killed, or which others join."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import programs
from documentation import ROOT, blocks_of
from torchbagua import elastic


def train() -> None:
    """Train until SIZE ranks are in generation GENERATION or a later one. Rank VICTIM kills itself once before."""
    size, generation, victim = (os.environ[name] for name in ("SIZE", "GENERATION", "VICTIM"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def body(run: elastic.Run) -> None:
        print(f"generation {run.generation}: {run.size} ranks", flush=True)
        first = run.step
        while run.step < first + 5 or run.generation < int(generation) or run.size < int(size):
            run.boundary()
            if os.environ["RANK"] == victim and run.step == first + 12:  # one that is lost sooner has to wait
                with suppress(FileExistsError):
                    Path("killed").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            run.module(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)

    elastic.run(body, model, optimizer, "bytegrad")
    print("weights", sum(float(parameter.detach().double().sum()) for parameter in model.parameters()), flush=True)


if __name__ == "__main__":
    train()
    sys.exit()


@dataclass(frozen=True)
class Launcher:
    """How ranks are started.

    Attributes:
        commands: of bash, which run at the same time, with the unused ports PORT_0 to PORT_3.
        size, generation: the number of ranks with which the training ends, from this generation on. A slow machine may
            lose a rank and admit another in one change.
        victims: the RANK that is killed, for each command: with agents of their own, all ranks have the same.
    """

    commands: Sequence[str]
    size: int
    generation: int
    victims: Sequence[str]


def script_of_page(wanted: str) -> str:
    (script,) = [block for block in blocks_of(ROOT / "docs/guides/elastic.md") if wanted in block.text]
    return script.text


def loop_on_one_host(rank: int) -> str:
    """Return the loop of the page, with ports that differ in place of hosts that differ."""
    script = script_of_page("train.py && break")
    script = script.replace("TORCHBAGUA_PORT=29400", f"TORCHBAGUA_PORT=$PORT_{rank}")
    for number in range(3):
        script = script.replace(f"node{number}:29400", f"localhost:$PORT_{number}")
    return f"RANK={rank}\n" + script.replace("node0", "localhost").replace("29500", "$PORT_3")


AGENT = "torchrun --nproc-per-node=1"
LAUNCHERS = {
    # The agent of rank 0 ends with it, and with the agent the store at which the ranks have met.
    "torchrun with node ranks": Launcher(
        [f"{AGENT} --nnodes=3 --node-rank={n} --master-addr=localhost --master-port=$PORT_0 train.py" for n in "012"],
        size=2,
        generation=1,
        victims=["0"] * 3,
    ),
    "torchrun --standalone": Launcher(
        [
            f"TORCHBAGUA_PORT=$PORT_0 {AGENT} --standalone train.py",
            f"TORCHBAGUA_JOIN=localhost:$PORT_0 {AGENT} --standalone --max-restarts=1 train.py",
        ],
        size=2,
        generation=2,
        victims=["nobody", "0"],
    ),
    # Rank 0 has the store at which the ranks have met.
    "a shell loop": Launcher([loop_on_one_host(rank) for rank in range(3)], size=3, generation=1, victims=["0"] * 3),
    "srun, which starts an agent that restarts its rank": Launcher(
        ["export SLURM_JOB_ID=$PORT_0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=localhost\n" + script_of_page("srun")],
        size=2,
        generation=1,
        victims=["1"],
    ),
}
STAND_INS = {
    "scontrol": "echo $3",
    "srun": """
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" & done
wait""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_is_killed_or_joins(name: str, tmp_path: Path) -> None:
    launcher = LAUNCHERS[name]
    (tmp_path / "train.py").symlink_to(__file__)
    for program, text in STAND_INS.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    environment = {
        **os.environ,
        **{f"PORT_{number}": str(port) for number, port in enumerate(unused_ports(4))},
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "SIZE": str(launcher.size),
        "GENERATION": str(launcher.generation),
    }
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                programs.started(["bash", "-c", command], env={**environment, "VICTIM": victim}, **options)
            )
            for command, victim in zip(launcher.commands, launcher.victims, strict=True)
        ]
        texts = [process.communicate(timeout=100)[0] for process in processes]
    text = "\n".join(texts)
    assert (tmp_path / "killed").exists()
    weights = re.findall("^weights .*", text, re.MULTILINE)
    assert len(weights) == launcher.size, text
    assert len(set(weights)) == 1


def unused_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(num)]


@pytest.fixture(autouse=True)
def no_default_group() -> None:
    """Close the default group of an earlier test."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_alone(**options: Any) -> None:
    model = torch.nn.Linear(2, 1)
    elastic.run(lambda run: None, model, torch.optim.SGD(model.parameters()), "bytegrad", **options)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_needs_an_address_if_the_store_of_its_launcher_has_ended(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 without an agent, which opens another store, and another rank."""
    (port,) = unused_ports(1)
    environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in {**environment, "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    message = f"store, localhost:{port}, within 1 s. .* needs the address .* as join or as TORCHBAGUA_JOIN"
    with pytest.raises(ConnectionError, match=message):
        run_alone(timeout=timedelta(seconds=1))


def test_nobody_answers_at_the_address_of_the_job() -> None:
    (port,) = unused_ports(1)
    with pytest.raises(ConnectionError, match=f"no process of the job to join answers at localhost:{port} within 1 s"):
        run_alone(timeout=timedelta(seconds=1), join=[f"localhost:{port}"])


def test_an_agent_with_several_ranks_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match="this agent of torchrun has 2 ranks, .* --nproc-per-node=1") as warned:
        run_alone()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_alone()


def test_any_quorum_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match="a link that is cut makes two trainings out of one"):
        run_alone(quorum="any")


def test_one_agent_a_rank_gets_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    before = sys.excepthook
    run_alone()
    assert sys.excepthook is before
