"""OuterResiduals: kept by parameter, committed by rounds, and dropped where other ranks send them."""

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
from torchbagua.runtime.weight_bucket import WeightBucket

NO_PROGRESS: dict[str, int] = {}
LENGTHS = {"first": 20, "second": 12, "wide": 6}
SMALL = 0.0001  # MiB of a bucket: one for each parameter


class InFloat32(Cast):
    """bfloat16 for float32 alone."""

    def encodes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32


BFLOAT16 = InFloat32()


class Component:
    """Residuals of the weights, whose outer gradient is in the flat tensor, in bfloat16 where that is float32."""

    def __init__(self, runner: tb.Runner, nodes: Sequence[int] | None, *, has_feedback: bool) -> None:
        self.runner = runner
        self.weights = runner.algorithm.make_weights(runner, lambda: NO_PROGRESS)
        self.residuals = OuterResiduals(runner, nodes, has_feedback=has_feedback)

    def append(self, bucket: tb.BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        residuals = self.residuals.of_bucket(bucket, bucket)
        codec = self.runner.codec_for(bucket)
        bucket.append_centralized_synchronous_op(hierarchical=False, compression=codec, error_feedback=residuals)

    def reset(self) -> None:
        """Make buckets again."""
        self.residuals.forget_buckets()
        self.runner.rebuild_buckets()

    def gradients(self, rank: int, number: int) -> dict[str, torch.Tensor]:
        seeds = {name: 100 * rank + 10 * number + index for index, name in enumerate(LENGTHS)}
        return {name: dyadic(length, seed=seeds[name]) for name, length in LENGTHS.items()}

    def round(self, rank: int, number: int) -> dict[str, torch.Tensor]:
        """Return the means of outer gradients, without committing what they leave out."""
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
    def make(runner: tb.Runner) -> Component:
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


def kept(component: Component) -> dict[str, torch.Tensor]:
    """Return what this rank keeps of the sums over ranks, by parameter; nothing without error feedback."""
    state, size = component.residuals.state_dict(), component.runner.process_group.size
    return {name: sent + size * state["mean"][name] for name, sent in state.get("sent", {}).items()}


@pytest.mark.parametrize("resets", [False, True])
def test_means_and_residuals_sum_to_what_was_sent(resets: bool) -> None:
    """Bit for bit, of dyadic gradients; also where buckets are made again between rounds."""

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
        return sent, received, kept(component)

    ranks = on_ranks(2, body)
    for name in ("first", "second"):
        sent, left_out = (sum(rank[which][name] for rank in ranks) for which in (0, 2))
        assert left_out.any()
        assert torch.equal(2 * ranks[0][1][name] + left_out, sent)
    assert "wide" not in ranks[0][2]
    assert torch.equal(2 * ranks[0][1]["wide"], sum(rank[0]["wide"] for rank in ranks))


def test_a_round_that_is_dropped_leaves_no_trace() -> None:
    """And one that is applied commits its own buckets alone."""

    def body(rank: int, component: Component) -> None:
        component.round(rank, 0)
        assert not any(one.any() for one in kept(component).values())
        component.residuals.commit([component.bucket_of("first")])
        after = kept(component)
        assert after["first"].any()
        assert not after["second"].any()

    on_ranks(2, body)


def test_loaded_weights_have_none() -> None:
    """Of several in one bucket, those that are named."""

    def body(rank: int, component: Component) -> None:
        component.round(rank, 0)
        component.residuals.commit(component.weights)
        before = kept(component)
        assert component.bucket_of("first") is component.bucket_of("second")
        component.residuals.clear(["second"])
        after = kept(component)
        assert torch.equal(after["first"], before["first"])
        assert before["second"].any()
        assert not after["second"].any()

    on_ranks(2, body, bucket_cap_mb=1.0)


def test_a_state_goes_on() -> None:
    """In buckets of other sizes too."""

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


def test_residuals_of_other_ranks_or_nodes_are_dropped_and_it_says_so() -> None:
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
        assert not any(one.any() for one in kept(component).values())

    for size, options, attached in (
        (3, {}, r"attached are 3 on None, with compression='bfloat16'"),
        (2, {"nodes": [0, 1]}, r"attached are 2 on \[0, 1\], with compression='bfloat16'"),
        (2, {"has_feedback": False, "codec": None}, "attached are 2 on None, with compression=None"),
    ):
        message = f"residuals of error feedback are dropped: the state is of 2 ranks on the nodes None, and {attached}"
        with pytest.warns(RuntimeWarning, match=message):
            on_ranks(size, load, **options)


def test_without_error_feedback_there_are_none() -> None:
    """And to load such a state drops nothing."""

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


def test_a_state_of_another_rank_of_as_many_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        check_residuals("Owner", {"rank": rank, "num_ranks": 2, "nodes": "None"}, own)
        check_residuals("Owner", {"rank": 1 - rank, "num_ranks": 3, "nodes": "None"}, own)
        with pytest.raises(
            ValueError, match=rf"^Owner\..* be that of rank {rank} of 2, got that of rank {1 - rank} of 2"
        ):
            check_residuals("Owner", {"rank": 1 - rank, "num_ranks": 2, "nodes": "None"}, own)
        with pytest.raises(ValueError, match=r"^Owner\..* must have the keys \['nodes', 'num_ranks', 'rank'\], got"):
            check_residuals("Owner", {"rank": rank, "num_ranks": 2}, own)

    run_ranks(2, body)
