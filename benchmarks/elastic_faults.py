"""The time of trainings in which ranks are killed, elastic or restarted by torchrun; a section of elastic.py."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import elastic_rank
from elastic_rank import POLL_S, Process, Settings
from processes import LOOPBACK, Limits, RankFailure, free_port

NUM_RANKS = 4
STALL_S = 300  # longest wait for a step: on a busy machine, processes import torch for minutes
ELASTIC, PLAIN = "elastic", "plain"


@dataclass(frozen=True)
class Fault:
    """The death of a rank, `after_s` seconds after the one before, or after the first step."""

    after_s: float
    rank: int


def draw_faults(seed: int, every_s: float, num_faults: int) -> list[Fault]:
    """Return faults that are `every_s` apart, give or take a third."""
    draw = random.Random(seed)
    return [Fault(every_s * draw.uniform(2 / 3, 4 / 3), draw.randrange(NUM_RANKS)) for _ in range(num_faults)]


class Training:
    """A training in real processes, with faults; a context manager that ends all of them.

    elastic: each rank is started by itself, as by a loop in a shell: if it has been killed, a new process joins.
    plain: one torchrun starts all ranks, and starts them again if one of them was killed.

    Args:
        prefix: the words before Python in each command.
    """

    def __init__(self, kind: str, settings: Settings, limits: Limits, prefix: Sequence[str]) -> None:
        self._kind = kind
        self._settings = settings
        self._limits = limits
        self._prefix = prefix
        self._scratch = Path(settings.scratch)
        path = self._scratch / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        self._program = [elastic_rank.__file__, str(path), kind]
        self._started: list[subprocess.Popen[bytes]] = []
        self._logged: dict[int, Process] = {}
        self._killed = set[int]()
        self._num_unplanned = 0
        self._slots: dict[int, Process] = {}

    def __enter__(self) -> "Training":
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(NUM_RANKS)}
        if self._kind == ELASTIC:
            for rank in range(NUM_RANKS):
                self._start_rank(rank, meeting | {"RANK": str(rank)})
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
            # docs/guides/restarts.md says what the variable is for.
            environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self._start([*command, "--max-restarts=1000", *self._program], environment)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks of torchrun end with it
            process.wait()

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", **environment}
        with open(self._scratch / f"{len(self._started)}.out", "wb") as output:
            options: dict[str, Any] = {"env": environment, "stdout": output, "stderr": output}
            command = [*self._prefix, *command]
            self._started.append(subprocess.Popen(command, preexec_fn=elastic_rank.begin_child, **options))
        return self._started[-1]

    def _start_rank(self, slot: int, environment: dict[str, str]) -> None:
        started = self._start([sys.executable, *self._program], environment)
        process = Process(started.pid, slot, self._settings.scratch, lambda: started.poll() is None)
        self._slots[slot] = self._logged[started.pid] = process

    def run(self, faults: Sequence[Fault]) -> dict[str, Any]:
        """Kill ranks until the training ends; return its seconds from the first step on, and what each fault cost."""
        pending, done = [*faults], list[tuple[float, int]]()
        last_s = progress_s = time.monotonic()
        with tqdm(desc=self._kind, total=self._settings.num_steps, unit="step", leave=False) as bar:
            while True:
                self._limits.check()
                self._read()
                num_steps = max((step for process in self._logged.values() for step in process.last_steps()), default=0)
                if num_steps == 0:
                    last_s = time.monotonic()
                if num_steps > bar.n:
                    progress_s = time.monotonic()
                    bar.update(num_steps - bar.n)
                if num_steps == self._settings.num_steps:
                    break
                if time.monotonic() > progress_s + STALL_S:
                    raise RankFailure(f"no new step for {STALL_S} s:\n{self._outputs()}")
                if pending and time.monotonic() > last_s + pending[0].after_s:
                    process = self._slots[pending[0].rank]
                    # Otherwise it starts after an earlier fault, and the new one waits.
                    if process.begun and process.is_alive():
                        pending.pop(0)
                        last_s = time.monotonic()
                        done.append((last_s, max(process.begun)))
                        os.kill(process.pid, signal.SIGKILL)
                        self._killed.add(process.pid)
                self._replace_dead()
                time.sleep(2 * POLL_S)
        self._await_end()
        return self._figures(done)

    def _read(self) -> None:
        if self._kind == PLAIN:
            for path in self._scratch.glob("*.jsonl"):
                pid = int(path.stem)
                if pid not in self._logged:
                    folder = Path(f"/proc/{pid}")  # torchrun waits for it, so it does not remain as a zombie
                    self._logged[pid] = Process(pid, -1, self._settings.scratch, folder.exists)
        for process in [*self._logged.values()]:
            process.read()
            if self._kind == PLAIN and process.begun:
                rank = process.newest["rank"]
                if rank not in self._slots or max(self._slots[rank].begun) <= max(process.begun):
                    self._slots[rank] = process

    def _replace_dead(self) -> None:
        if self._kind == PLAIN:
            if self._started[0].poll() is not None:
                raise RankFailure(f"torchrun has ended:\n{self._outputs()}")
            return
        living = [process for process in self._slots.values() if process.is_alive() and process.begun]
        for slot, process in [*self._slots.items()]:
            if not process.is_alive():
                self._num_unplanned += process.pid not in self._killed
                if not living:
                    raise RankFailure(f"no rank is left:\n{self._outputs()}")
                addresses = (f"{other.newest['host']}:{other.newest['port']}" for other in living)
                self._start_rank(slot, {"TORCHBAGUA_JOIN": ",".join(addresses)})

    def _await_end(self) -> None:
        """Wait for the last step of the other ranks. A process that has not joined yet never will."""
        end_s = time.monotonic() + STALL_S
        finishing = [process for process in self._slots.values() if process.begun and process.pid not in self._killed]
        while any(self._settings.num_steps not in process.last_steps() for process in finishing):
            self._limits.check()
            if time.monotonic() > end_s:
                raise RankFailure(f"not all ranks finish the last step:\n{self._outputs()}")
            time.sleep(POLL_S)
            self._read()

    def _figures(self, done: Sequence[tuple[float, int]]) -> dict[str, Any]:
        steps = [step for process in self._logged.values() for each in process.steps.values() for step in each]
        first_s, end_s = (pick(step["at_s"] for step in steps) for pick in (min, max))
        ends = ([step["at_s"] for step in steps if step["generation"] > generation] for _, generation in done)
        trained = {(step["generation"], step["step"]) for step in steps}
        return {
            "seconds": end_s - first_s,
            "num_faults": len(done),
            "to_next_step_s": [min(times_s) - at_s for (at_s, _), times_s in zip(done, ends, strict=True) if times_s],
            "num_repeated_steps": len(trained) - self._settings.num_steps,
            "num_unplanned_ends": self._num_unplanned,
        }

    def _outputs(self) -> str:
        texts = (path.read_text(errors="replace")[-2000:] for path in sorted(self._scratch.glob("*.out")))
        return "\n".join(text for text in texts if text)
