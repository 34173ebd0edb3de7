"""OuterResiduals: stored by parameter, committed by rounds, and dropped if other ranks send them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import WeightComponent, dyadic, running
from ranks import run_ranks
from torchbagua.algorithms.weights.outer_residuals import OuterResiduals, check_residuals
from torchbagua.codecs.cast import Cast
from torchbagua.runtime.weight_buckets import WeightBucket

NO_PROGRESS: dict[str, int] = {}
LENGTHS = {"first": 20, "second": 12, "wide": 6}
SMALL = 0.0001  # MiB per bucket, so that each parameter has a separate bucket


class InFloat32(Cast):
    """bfloat16 for float32 alone."""

    def encodes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32


BFLOAT16 = InFloat32()


class Component:
    """Residuals of weights; a flat tensor contains the outer gradients, sent in bfloat16 if they are float32."""

    def __init__(self, runner: tb.extend.Runner, nodes: Sequence[int] | None, *, has_feedback: bool) -> None:
        self.runner = runner
        self.weights = runner.algorithm.make_weights(runner, lambda: NO_PROGRESS)
        self.residuals = OuterResiduals(runner, nodes, has_feedback=has_feedback)

    def append(self, bucket: tb.extend.BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        residuals = self.residuals.of_bucket(bucket, bucket)
        codec = self.runner.codec_for(bucket)
        bucket.append_centralized_synchronous_op(hierarchical=False, compression=codec, error_feedback=residuals)

    def reset(self) -> None:
        """Rebuild the buckets."""
        self.residuals.forget_buckets()
        self.runner.rebuild_buckets()

    def gradients(self, rank: int, number: int) -> dict[str, torch.Tensor]:
        seeds = {name: 100 * rank + 10 * number + index for index, name in enumerate(LENGTHS)}
        return {name: dyadic(length, seed=seeds[name]) for name, length in LENGTHS.items()}

    def round(self, rank: int, number: int) -> dict[str, torch.Tensor]:
        """Return the means of outer gradients, without committing the residuals."""
        gradients = self.gradients(rank, number)
        for bucket in self.weights:
            for name, part in bucket.named(bucket.flat).items():
                part.copy_(gradients[name])
        self.runner.lane.submit(lambda: [bucket.run() for bucket in self.weights]).result()
        return self.weights.by_name(lambda bucket: bucket.flat)

    def bucket_of(self, name: str) -> WeightBucket:
        return next(bucket for bucket in self.weights if name in bucket.named(bucket.flat))


def on_ranks(
    size: int,
    body: Any,
    *,
    nodes: Sequence[int] | None = None,
    has_feedback: bool = True,
    codec: str | None = "bfloat16",
    bucket_cap_mb: float = SMALL,
) -> list[Any]:
    def make(runner: tb.extend.Runner) -> Component:
        return Component(runner, nodes, has_feedback=has_feedback)

    algorithm = WeightComponent(
        make=make, append=Component.append, codec=BFLOAT16, compression=codec, bucket_cap_mb=bucket_cap_mb
    )

    def run(group: dist.ProcessGroup) -> Any:
        module = nn.Module()
        for name, length in LENGTHS.items():
            dtype = torch.float64 if name == "wide" else torch.float32
            module.register_parameter(name, nn.Parameter(torch.zeros(length, dtype=dtype)))
        with running(group, algorithm, module=module) as (_, component):
            return body(group.rank(), component)

    return run_ranks(size, run)


def residuals_of_sums(component: Component) -> dict[str, torch.Tensor]:
    """Return this rank's residuals of the sums over ranks, by parameter; empty without error feedback."""
    state, size = component.residuals.state_dict(), component.runner.process_group.size
    return {name: sent + size * state["mean"][name] for name, sent in state.get("sent", {}).items()}


@pytest.mark.parametrize("resets", [False, True])
def test_means_and_residuals_sum_to_the_gradients(resets: bool) -> None:
    """Bitwise, for dyadic gradients; also if buckets are rebuilt between rounds."""

    def body(rank: int, component: Component) -> tuple[Any, ...]:
        sent = {name: torch.zeros(length) for name, length in LENGTHS.items()}
        received = {name: torch.zeros(length) for name, length in LENGTHS.items()}
        for number in range(4):
            for name, mean in component.round(rank, number).items():
                received[name] += mean
                sent[name] += component.gradients(rank, number)[name]
            component.residuals.commit(component.weights)
            if resets:
                component.reset()
        return sent, received, residuals_of_sums(component)

    ranks = on_ranks(2, body)
    for name in ("first", "second"):
        sent, residual = (sum(rank[index][name] for rank in ranks) for index in (0, 2))
        assert residual.any()
        assert torch.equal(2 * ranks[0][1][name] + residual, sent)
    assert "wide" not in ranks[0][2]
    assert torch.equal(2 * ranks[0][1]["wide"], sum(rank[0]["wide"] for rank in ranks))


def test_a_round_that_is_dropped_leaves_no_trace() -> None:
    """An applied round commits only its own buckets."""

    def body(rank: int, component: Component) -> None:
        component.round(rank, 0)
        assert not any(residual.any() for residual in residuals_of_sums(component).values())
        component.residuals.commit([component.bucket_of("first")])
        after = residuals_of_sums(component)
        assert after["first"].any()
        assert not after["second"].any()

    on_ranks(2, body)


def test_loaded_weights_have_no_residuals() -> None:
    """If a bucket has several weights, only the residuals of the named weights are cleared."""

    def body(rank: int, component: Component) -> None:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        before = residuals_of_sums(component)
        assert component.bucket_of("first") is component.bucket_of("second")
        component.residuals.clear(["second"])
        after = residuals_of_sums(component)
        assert torch.equal(after["first"], before["first"])
        assert before["second"].any()
        assert not after["second"].any()

    on_ranks(2, body, bucket_cap_mb=1.0)


def test_a_state_continues() -> None:
    """Also with buckets of other sizes."""

    def save(rank: int, component: Component) -> tuple[Any, Any]:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        return component.residuals.state_dict(), component.round(rank, 1)

    saved = on_ranks(2, save, nodes=[0, 1])

    def load(rank: int, component: Component) -> None:
        component.residuals.load_state_dict(saved[rank][0])
        component.reset()
        for name, mean in component.round(rank, 1).items():
            assert torch.equal(mean, saved[rank][1][name])

    on_ranks(2, load, nodes=[0, 1], bucket_cap_mb=1.0)


def test_residuals_of_other_ranks_or_nodes_are_dropped_with_a_warning() -> None:
    def save(rank: int, component: Component) -> Any:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        return component.residuals.state_dict()

    saved = on_ranks(2, save)

    def load(rank: int, component: Component) -> None:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        component.residuals.load_state_dict(saved[rank % 2])
        component.reset()
        assert not any(residual.any() for residual in residuals_of_sums(component).values())

    for size, options, attached in (
        (3, {}, r"3 ranks on the nodes None are attached, with compression='bfloat16'"),
        (2, {"nodes": [0, 1]}, r"2 ranks on the nodes \[0, 1\] are attached, with compression='bfloat16'"),
        (2, {"has_feedback": False, "codec": None}, "2 ranks on the nodes None are attached, with compression=None"),
    ):
        message = f"residuals of error feedback are dropped: .*saved by 2 ranks on the nodes None, but {attached}"
        with pytest.warns(RuntimeWarning, match=message):
            on_ranks(size, load, **options)


def test_without_error_feedback_there_are_no_residuals() -> None:
    """Loading such a state drops nothing."""

    def body(rank: int, component: Component) -> Any:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        component.residuals.clear(list(LENGTHS))
        return component.residuals.state_dict()

    saved = on_ranks(2, body, has_feedback=False)
    assert saved == [{"rank": rank, "num_ranks": 2, "nodes": "None"} for rank in range(2)]

    def load(rank: int, component: Component) -> None:
        component.residuals.load_state_dict(saved[rank])
        component.reset()
        assert component.residuals.state_dict().keys() == {"rank", "num_ranks", "nodes", "sent", "mean"}

    on_ranks(2, load)


def test_a_state_of_another_rank_of_the_same_world_size_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        check_residuals("Owner", {"rank": rank, "num_ranks": 2, "nodes": "None"}, own)
        check_residuals("Owner", {"rank": 1 - rank, "num_ranks": 3, "nodes": "None"}, own)
        with pytest.raises(
            ValueError, match=rf"^Owner\..* be from rank {rank} of 2, got a state from rank {1 - rank} of 2"
        ):
            check_residuals("Owner", {"rank": 1 - rank, "num_ranks": 2, "nodes": "None"}, own)
        with pytest.raises(ValueError, match=r"^Owner\..* must have the keys \['nodes', 'num_ranks', 'rank'\], got"):
            check_residuals("Owner", {"rank": rank, "num_ranks": 2}, own)

    run_ranks(2, body)
