"""One rank of the network benchmark, started by network.py inside its namespace.

All contestants run in this process, over one process group, and take turns: in a round each of them trains one block of
steps. A temporary load on the machine then slows down all of them.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from contestants import COMPUTE_ONLY, CONTESTANTS, Contestant, Entry, Setup, build_batch, build_model
from processes import begin_rank, leave_process_group, report_progress
from schedule import choose_schedule
from traffic import Traffic, read_loopback_traffic, read_traffic

MAX_ROUNDS = 40
SLOWDOWN = 3
FREE_TRIAL_STEPS = 10  # of contestants with communication that is not tied to steps
ROUNDS_A_BLOCK = 3  # minimum, of contestants that average once every few steps
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step, PowerSGD compresses from the third


@dataclass(frozen=True)
class Settings:
    """The settings that network.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json and of result0.json, result1.json, ...
    init_method: str
    switch: str | None  # namespace with the counters of sent bytes; None: this machine's loopback
    nodes: list[int]  # node of each rank
    contestants: list[str]
    num_parameters: int
    is_idle: bool  # models wait instead of computing
    compute_ms: float | None  # how long they wait; None: for the recorded compute times
    bucket_cap_mb: float
    block_steps: int  # of contestants with communication that is tied to steps
    free_block_s: float  # length of the other contestants' blocks
    slow_rank: int | None  # this rank waits after each step, as if it computed three times as long
    min_rounds: int
    seconds: float  # target time of all measured rounds


@dataclass(frozen=True)
class Block:
    """One block of steps of one contestant on one rank. The bytes are of the whole block."""

    contestant: str
    num_steps: int
    seconds: float
    processor_s: float  # of all threads of this rank
    recorded_bytes: int | None  # the library's count of the bytes that this rank has sent
    traffic: Traffic | None  # read by rank 0, for all ranks


def trial_steps(contestant: Contestant) -> int:
    """Return the number of steps of a contestant that are timed for the plan; its warm-up ends with them.

    If rounds are several steps apart, the trial ends one step before the second round begins. All blocks, which consist
    of whole rounds, end at the same place: nothing is in flight then, since no delay extends into the next round.
    """
    if not contestant.tied_to_steps:
        return FREE_TRIAL_STEPS
    return max(1, 2 * contestant.steps_a_round - WARM_UP_STEPS)


def num_block_steps(contestant: Contestant, tied: int, free: int) -> int:
    """Return the steps of a contestant's blocks: `tied` or `free`, depending on its communication, or whole rounds."""
    if not contestant.tied_to_steps:
        return free
    if contestant.steps_a_round == 1:
        return tied
    return contestant.steps_a_round * max(ROUNDS_A_BLOCK, math.ceil(tied / contestant.steps_a_round))


class Race:
    """All contestants of one network, on this rank. Every method is collective: all ranks call it in the same order."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        dist.init_process_group("gloo", init_method=settings.init_method, rank=rank, world_size=len(settings.nodes))
        model = build_model(settings.num_parameters)
        self.numels = [parameter.numel() for parameter in model.parameters()]
        self.batch = build_batch(model, rank)
        self.schedule = choose_schedule(model, self.batch, settings.compute_ms)
        setup = Setup(model, settings.bucket_cap_mb, settings.nodes, self.schedule if settings.is_idle else None)
        self.entries: dict[str, Entry] = {name: CONTESTANTS[name].wrap(setup) for name in settings.contestants}
        self.pause_s = 0.0  # after each step
        self.num_done = 0
        self.trial_steps = {name: trial_steps(CONTESTANTS[name]) for name in settings.contestants}
        self.num_planned = (WARM_UP_STEPS - 1) * len(self.entries) + sum(self.trial_steps.values())

    def run(self) -> list[Block]:
        """Warm up, then run as many rounds as fit the target time. Returns the blocks in the order they ran."""
        for name in self.entries:
            for _ in range(WARM_UP_STEPS - 1):  # one by one, to report progress on the slowest networks
                self._run_steps(name, 1)
        trial_seconds = {name: self._run_steps(name, steps) / steps for name, steps in self.trial_steps.items()}
        free_steps = max(self.settings.block_steps, math.ceil(self.settings.free_block_s / trial_seconds[COMPUTE_ONLY]))
        block_steps = {
            name: num_block_steps(CONTESTANTS[name], self.settings.block_steps, free_steps) for name in self.entries
        }
        fitting = int(self.settings.seconds / sum(block_steps[name] * trial_seconds[name] for name in self.entries))
        num_rounds = min(max(fitting, self.settings.min_rounds), MAX_ROUNDS)
        num_rounds, *agreed_steps = self._agree([num_rounds, *block_steps.values()])
        self.num_planned += num_rounds * sum(agreed_steps)
        plan = list(zip(self.entries, agreed_steps, strict=True))
        if self.rank == self.settings.slow_rank:
            self.pause_s = (SLOWDOWN - 1) * trial_seconds[COMPUTE_ONLY]
            plan = [(name, steps if CONTESTANTS[name].tied_to_steps else -(-steps // SLOWDOWN)) for name, steps in plan]
        return [self._run_block(name, num_steps) for _ in range(num_rounds) for name, num_steps in plan]

    def close(self) -> None:
        for entry in self.entries.values():
            entry.close()
        self.entries.clear()
        leave_process_group()

    def _agree(self, numbers: list[int]) -> list[int]:
        """Return rank 0's numbers."""
        agreed = torch.tensor(numbers)
        dist.broadcast(agreed, src=0)
        return agreed.tolist()  # type: ignore[no-any-return]  # Tensor.tolist is not typed

    def _run_block(self, name: str, num_steps: int) -> Block:
        entry = self.entries[name]
        recorded_before = entry.recorder.bytes_sent if entry.recorder else 0
        traffic_before = self._read_traffic()
        processor_before_s = time.process_time()
        seconds = self._run_steps(name, num_steps)
        processor_s = time.process_time() - processor_before_s
        dist.barrier()  # the other ranks' last packets belong to this block
        traffic_after = self._read_traffic()
        return Block(
            name,
            num_steps,
            seconds,
            processor_s,
            entry.recorder.bytes_sent - recorded_before if entry.recorder else None,
            traffic_after - traffic_before if traffic_after and traffic_before else None,
        )

    def _run_steps(self, name: str, num_steps: int) -> float:
        """Return the seconds that `num_steps` steps took on this rank; all ranks start together."""
        entry = self.entries[name]
        entry.resume()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            entry.train_step(self.batch)
            time.sleep(self.pause_s)
        entry.finish_round()
        seconds = time.perf_counter() - start
        entry.pause()
        self.num_done += num_steps
        if self.rank == 0:
            report_progress(Path(self.settings.scratch), self.num_done, self.num_planned, CONTESTANTS[name].label)
        return seconds

    def _read_traffic(self) -> Traffic | None:
        if self.rank != 0:
            return None
        num_ranks = len(self.settings.nodes)
        if self.settings.switch is None:
            return read_loopback_traffic(num_ranks)
        return read_traffic(self.settings.switch, num_ranks)


def main() -> None:
    settings, rank = begin_rank(Settings)
    race = Race(settings, rank)
    blocks = race.run()
    race.close()
    result = {
        "numels": race.numels,
        "schedule": asdict(race.schedule),
        "blocks": [asdict(block) for block in blocks],
    }
    (Path(settings.scratch) / f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
