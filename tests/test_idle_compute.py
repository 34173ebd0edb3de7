"""The benchmarks' schedule of a step: floors, buckets, and a model that sleeps instead of computing."""

import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import init_default_group
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
from contestants import CONTESTANTS, Setup, build_batch, build_model
from idle import IdleModel, IdleOptimizer, IdleQAdamOptimizer, find_idle_model
from report import markdown_table, median_interval, summarise
from schedule import (
    FRAME_BYTES_PER_PAYLOAD_BYTE,
    Schedule,
    group_into_buckets,
    record_schedule,
    schedule_floor_s,
)

MIB_ELEMENTS = 2**18  # of float32
SCHEDULE = Schedule(0.01, [0.05, 0.04, 0.03, 0.02])  # of two layers


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_schedule_floor_is_the_maximum_over_buckets() -> None:
    # Two buckets of 1 MiB, ready after 2 and 4 s. Each transfer takes 1 s, then 3 s.
    numels, schedule = [MIB_ELEMENTS] * 2, Schedule(1.0, [4.0, 2.0])

    def floor_s(transfer_s: float, bucket_cap_mb: float = 1.0) -> float:
        payload = 2 * transfer_s * 1e6 / 8 / FRAME_BYTES_PER_PAYLOAD_BYTE
        return schedule_floor_s(schedule, numels, bucket_cap_mb, payload, 1e6)

    assert floor_s(1.0) == pytest.approx(4 + 1), "the second is sent when it is ready; the link is idle before"
    assert floor_s(3.0) == pytest.approx(2 + 3 + 3), "the second waits for the first"
    assert floor_s(3.0, bucket_cap_mb=2.0) == pytest.approx(4 + 6), "one bucket, which is ready at the end"
    assert floor_s(0.0) == pytest.approx(4), "without bytes only compute time remains"


def test_buckets_are_grouped_in_the_order_of_ready_gradients() -> None:
    numels = [3 * MIB_ELEMENTS, 1, MIB_ELEMENTS, MIB_ELEMENTS, 1]
    assert group_into_buckets(numels, [5, 4, 3, 2, 1], 2) == [[4, 3, 2], [1, 0]]
    assert group_into_buckets(numels, [1, 2, 3, 4, 5], 2) == [[0], [1, 2, 3], [4]]
    assert group_into_buckets([MIB_ELEMENTS] * 4, [1, 2, 3, 4], 2) == [[0, 1], [2, 3]], (
        "a full bucket is within the cap"
    )


def test_recorded_gradients_are_ready_in_the_order_of_backward() -> None:
    model = build_model(50_000)
    schedule = record_schedule(model, build_batch(model, 0))
    assert len(schedule.ready_s) == len(list(model.parameters()))
    assert 0 < schedule.forward_s < min(schedule.ready_s)
    layers_s = schedule.buckets_ready_s([[2 * layer, 2 * layer + 1] for layer in range(12)])
    assert layers_s == sorted(layers_s, reverse=True), "the last layer comes first"
    assert all(parameter.grad is None for parameter in model.parameters()), "only a copy was trained"
    scaled = schedule.scaled_to(2.0)
    assert max(scaled.ready_s) == pytest.approx(2.0)
    assert scaled.forward_s / 2.0 == pytest.approx(schedule.forward_s / max(schedule.ready_s))


class HookedIdleModel:
    """An idle model with DDP over one rank, with a hook that halves gradients and records its arguments."""

    def __init__(self, bucket_cap_mb: float) -> None:
        init_default_group()
        self.model = IdleModel(two_layers(), SCHEDULE)
        self.numbers = {id(parameter): number for number, parameter in enumerate(self.model.parameters())}
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(None, self.hook)
        self.start_s = 0.0
        self.seen: list[tuple[float, dict[int, torch.Tensor], int]] = []

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        since_s = time.perf_counter() - self.start_s
        numbers = [self.numbers[id(parameter)] for parameter in bucket.parameters()]
        gradients = {number: gradient.clone() for number, gradient in zip(numbers, bucket.gradients(), strict=True)}
        self.seen.append((since_s, gradients, bucket.buffer().untyped_storage().data_ptr()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(0.5))
        return future

    def step(self) -> None:
        self.seen.clear()
        self.start_s = time.perf_counter()
        self.model.begin_step()
        self.ddp(torch.zeros(1)).square().mean().backward()


def test_idle_model_passes_the_gradients_of_the_previous_step_to_ddp() -> None:
    hooked = HookedIdleModel(bucket_cap_mb=25)
    begun = [gradient.clone() for gradient in hooked.model.gradients]
    assert all(gradient.abs().max() > 0 for gradient in begun)
    for step in range(4):
        hooked.step()
        given = {number: gradient for _, gradients, _ in hooked.seen for number, gradient in gradients.items()}
        for number, gradient in enumerate(begun):
            assert torch.equal(given[number], gradient * 0.5**step)
    buffers = {storage for _, _, storage in hooked.seen}
    for parameter in hooked.model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() in buffers, "nothing is copied into the buckets"


def test_buckets_are_ready_at_the_times_of_the_schedule() -> None:
    # One bucket per parameter after the first step: DDP does not split a parameter, and no two fit the cap.
    hooked = HookedIdleModel(bucket_cap_mb=1e-5)
    numels = [parameter.numel() for parameter in hooked.model.parameters()]
    buckets = group_into_buckets(numels, SCHEDULE.ready_s, 1e-5)
    hooked.step()
    late_s: list[list[float]] = [[] for _ in buckets]
    for _ in range(10):
        hooked.step()
        assert [sorted(gradients) for _, gradients, _ in hooked.seen] == [sorted(bucket) for bucket in buckets]
        for late, (since_s, _, _), ready_s in zip(late_s, hooked.seen, SCHEDULE.buckets_ready_s(buckets), strict=True):
            late.append(since_s - ready_s)
    assert buckets == [[3], [2], [1], [0]]
    assert min(map(min, late_s)) >= 0
    # The best of ten steps: other processes of the machine can delay any sleep, but hardly all of them. Consecutive
    # sleeps for the whole ready times would be 20 ms late at the second bucket already.
    assert max(map(min, late_s)) < 0.008


def test_idle_optimizers_count_their_steps_and_leave_weights_alone() -> None:
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    calls: Counter[str] = Counter()
    plain, adam = IdleOptimizer(parameters), IdleQAdamOptimizer(parameters, warmup_steps=1)
    for name, optimizer in (("plain", plain), ("adam", adam)):
        optimizer.register_step_post_hook(lambda *_, name=name: calls.update([name]))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
    adam.step()
    weights = [parameter.clone() for parameter in parameters]
    assert not torch.equal(weights[0], torch.ones(4)), "the warm-up is Adam's"
    momenta = [adam.state[parameter]["exp_avg"].clone() for parameter in parameters]
    for _ in range(2):
        adam.step()
    assert adam.num_updates == [3, 3]
    assert all(map(torch.equal, parameters, weights))
    assert all(
        torch.equal(adam.state[parameter]["exp_avg"], momentum)
        for parameter, momentum in zip(parameters, momenta, strict=True)
    )
    assert calls == {"plain": 1, "adam": 3}


def test_an_idle_contestant_has_the_parameters_of_the_computing_contestant() -> None:
    init_default_group()
    model = build_model(10_000)
    real, idle = (Setup(model, 8.0, [0], schedule) for schedule in (None, Schedule(0.0, [0.0] * 24)))
    for setup in (real, idle):
        entry = CONTESTANTS["ddp"].wrap(setup)
        assert (find_idle_model(entry.module) is None) == (setup is real)
        shapes = [parameter.shape for parameter in entry.module.parameters()]
        assert shapes == [parameter.shape for parameter in model.parameters()]
        entry.train_step(build_batch(model, 0))


NETWORK: dict[str, Any] = {"title": "1mbit", "rank_rate": "1mbit", "link_rate": None, "bucket_cap_mb": 1.0}


def result(step_s: dict[str, float]) -> dict[str, Any]:
    """Return the result of one of two ranks that measured a block of one step of each contestant."""
    traffic = {"sent_by_rank": [0, 0], "over_link": []}
    shared = {"num_steps": 1, "processor_s": 0.25, "recorded_bytes": None, "traffic": traffic}
    blocks = [{"contestant": name, "seconds": seconds, **shared} for name, seconds in step_s.items()]
    return {"numels": [MIB_ELEMENTS] * 2, "schedule": {"forward_s": 1.0, "ready_s": [4.0, 2.0]}, "blocks": blocks}


def test_every_row_has_a_schedule_floor() -> None:
    section = summarise(NETWORK, [result({"compute": 5.0, "ddp": 20.0, "decentralized": 20.0})] * 2, 1)
    # Each of two ranks sends every element once, in float32.
    sent_ms = 8e3 * 2 * 2**20 * FRAME_BYTES_PER_PAYLOAD_BYTE / 1e6
    compute, ddp, decentralized = section["rows"]
    assert compute["schedule_floor_ms"] == compute["floor_ms"] == 5000
    assert ddp["floor_ms"] == pytest.approx(sent_ms)
    assert ddp["schedule_floor_ms"] == pytest.approx(2000 + sent_ms)
    assert ddp["schedule_floor_ratio"] == pytest.approx(20e3 / (2000 + sent_ms))
    assert decentralized["schedule_floor_ms"] == decentralized["floor_ms"] == pytest.approx(sent_ms)
    shown = markdown_table(section)
    assert "| DDP float32 | 20000 | 250 | 0.00 |  | 17532 | 1.14 | 19532 | 1.02 | 1.00 (1.00 to 1.00) |" in shown
    assert shown.endswith("rows that do not wait for gradients: compute only; Decentralized, all.")
    unshaped = summarise(NETWORK | {"rank_rate": None}, [result({"compute": 5.0, "ddp": 20.0})] * 2, 1)
    assert [row["schedule_floor_ms"] for row in unshaped["rows"]] == [5000, 5000]


def test_tables_of_earlier_results_are_shown_without_a_schedule_floor() -> None:
    section = summarise(NETWORK, [result({"compute": 5.0, "ddp": 20.0})] * 2, 1)
    del section["schedule"]
    for row in section["rows"]:
        del row["schedule_floor_ms"], row["schedule_floor_ratio"], row["processor_ms"]
    dash = "\N{EN DASH}"
    assert f"| DDP float32 | 20000 | {dash} |" in markdown_table(section)
    assert f"| 17532 | 1.14 | {dash} | {dash} | 1.00 (1.00 to 1.00) |" in markdown_table(section)


@pytest.mark.parametrize(
    ("num_values", "low", "high"),
    # 6 values lie on one side of the median once in 32 times; of 30, ten or more than twenty do once in 23.
    [(1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (30, 9, 20)],
)
def test_the_median_lies_between_two_values(num_values: int, low: int, high: int) -> None:
    assert median_interval([float(value) for value in reversed(range(num_values))]) == [low, high]


def test_many_rounds_show_where_the_median_lies() -> None:
    names = {"compute": 5.0, "ddp": 20.0}
    single = result(names)
    many = single | {"blocks": single["blocks"] * 20}
    assert "| 1.00 (1.00 to 1.00) | 1.000 to 1.000 |" in markdown_table(summarise(NETWORK, [many] * 2, 1))
