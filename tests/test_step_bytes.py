"""The bytes that observers know of at the end of a step: each round in one step, whole, and nothing of the next."""

import copy
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.observe.events import Trace

NUM_STEPS = 7
WIDTH = 96
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH
NUM_LAYERS = 3
ROUND_BYTES = NUM_LAYERS * LAYER_BYTES  # of two ranks in float32
SLOW_S = 0.01


class Run(SimpleNamespace):
    """One rank's model, optimizer, observers and attachment, and the `result` of its body; `step` trains a step."""

    def step(self) -> None:
        self.ddp(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Sampler(tb.observe.Recorder, Trace):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def samples(self, step: int) -> bool:
        self.asked.append(step)
        return False


def run_attached(algorithm: tb.Algorithm, body: Callable[[Run], object], *, size: int = 2) -> list[Run]:
    """Attach on threads, with a bucket for each layer; call `body`, and return the detached runs."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def train(group: dist.ProcessGroup) -> Run:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        recorder, summary = Sampler(), tb.observe.Summary()
        with tb.attach(ddp, optimizer, algorithm, observers=[recorder, summary]) as attachment:
            run = Run(ddp=ddp, optimizer=optimizer, recorder=recorder, summary=summary, attachment=attachment)
            run.result = body(run)
        return run

    return run_ranks(size, train)


def payload(run: Run, step: int | None = None) -> int:
    """Return the bytes of weights that the recorder knows of: of one step, or of all. Agreements are left out."""
    events = run.recorder.events
    return sum(event.bytes_sent for event in events if event.operation != "agreement" and step in (None, event.step))


CAP_MB = LAYER_BYTES / 2**20
# By the number of ended steps, the number of rounds reported by then; and the number of rounds in flight at detach.
ALGORITHMS = {
    "decentralized": (tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB), lambda step: step, 1),
    "every third": (
        tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB, communication_interval=3),
        lambda step: -(-step // 3),
        0,
    ),
    "low precision": (
        tb.LowPrecisionDecentralizedAlgorithm(bucket_cap_mb=CAP_MB, compression=None),
        lambda step: step,
        1,
    ),
    "diloco": (
        tb.DiLoCoAlgorithm(2, bucket_cap_mb=CAP_MB, compression=None),
        lambda step: step // 2,
        0,
    ),
    "local SGD": (tb.LocalSGDAlgorithm(1, bucket_cap_mb=CAP_MB, compression=None), lambda step: step, 0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_reported_at_the_end_of_its_step(name: str) -> None:
    """If the lane is slow, the awaited messages belong to the step; if it is fast, nothing of the next round does."""
    algorithm, rounds_after, num_in_flight = ALGORITHMS[name]

    def body(run: Run) -> list[int]:
        runner = run.attachment.runner

        def slow(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            time.sleep(SLOW_S)  # so that the round lasts longer than forward and backward

        add = runner.weights.add

        def slow_add(*arguments: object, **options: object) -> None:
            add(*arguments, **options)
            time.sleep(2 * SLOW_S)  # so that the lane has begun the next round when the step ends

        if name in ("decentralized", "every third"):
            runner.buckets[-1].append_python_op(slow)
            runner.weights.add = slow_add
        totals = []
        for _ in range(NUM_STEPS):
            run.step()
            totals.append(payload(run))
        return totals

    expected = [ROUND_BYTES * rounds_after(step) for step in range(NUM_STEPS + 1)]
    for run in run_attached(algorithm, body):
        assert run.result == expected[1:]
        of_steps = [payload(run, step) for step in range(NUM_STEPS)]
        assert of_steps == [after - before for before, after in pairwise(expected)]
        figures = run.summary.figures
        assert figures.num_steps == NUM_STEPS
        assert figures.bytes_sent == pytest.approx(sum(of_steps), abs=200 * NUM_STEPS), "agreements beside them"
        after, in_detaching = run.summary.bytes_after, run.summary.bytes_in_detaching
        assert after == pytest.approx((num_in_flight + 1) * ROUND_BYTES, abs=400)
        assert in_detaching == pytest.approx(ROUND_BYTES, abs=200), "the last mean"
        mb, of_mb = f"{after / 1e6:.3f} MB more after its last step", f"{in_detaching / 1e6:.3f} MB of it during detach"
        assert (f"{mb}, {of_mb}" if num_in_flight else f"{mb}, during detach") in str(run.summary)


def test_finishing_a_round_reports_it() -> None:
    def body(run: Run) -> tuple[int, int, int]:
        run.step()
        run.step()  # then a round begins that is applied after the fourth step
        run.attachment.runner.lane.submit(lambda: None).result()
        before = payload(run)
        run.attachment.impl.finish_round()
        return before, payload(run), payload(run, 2)

    algorithm = tb.DiLoCoAlgorithm(4, fragments=2, delay=1, bucket_cap_mb=CAP_MB, compression=None)
    for run in run_attached(algorithm, body):
        before, after, in_third_step = run.result
        assert before == 0
        assert after == in_third_step > 0


def test_a_summary_contains_all_bytes_sent_until_it_is_read() -> None:
    def body(run: Run) -> tuple[int, int]:
        run.step()
        run.attachment.runner.lane.submit(lambda: None).result()  # the round that overlaps the second step is done
        before = payload(run)
        assert run.attachment.summary() is run.summary
        return before, payload(run)

    for run in run_attached(tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB), body):
        assert run.result == (ROUND_BYTES, 2 * ROUND_BYTES)
        assert run.summary.figures.num_steps == 1


def test_abort_reports_the_rounds_until_then() -> None:
    def body(run: Run) -> tuple[int, int]:
        run.step()
        run.attachment.impl.abort(run.ddp)
        return run.attachment.impl.num_rounds, payload(run)

    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, bucket_cap_mb=CAP_MB)
    for run in run_attached(algorithm, body):
        num_rounds, num_bytes = run.result
        assert num_rounds >= 1
        assert num_bytes == num_rounds * ROUND_BYTES


def test_observers_are_asked_for_samples_once_a_step() -> None:
    """Also for the next step, if the lane works on it before the last step has ended."""

    def body(run: Run) -> None:
        for _ in range(NUM_STEPS):
            run.step()

    for name in ("decentralized", "diloco"):
        for run in run_attached(ALGORITHMS[name][0], body):
            assert run.recorder.asked == list(range(NUM_STEPS + 1))
