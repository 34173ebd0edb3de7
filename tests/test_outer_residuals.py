"""The residuals of outer gradients: stored by parameter, committed by rounds, dropped if other ranks send them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import dyadic, running
from ranks import run_ranks
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Cast
from torchbagua.runtime.weight_buckets import WeightBucket

LENGTHS = {"first": 20, "second": 12, "wide": 6}
SMALL = 0.0001  # MiB per bucket, so that each parameter has a separate bucket


class InFloat32(Cast):
    """bfloat16 for float32 alone."""

    def encodes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32


BFLOAT16 = InFloat32()


class Rounds:
    """Rounds of `LocalSGDAlgorithm`, one a step, which change the shadow weights by the mean of outer gradients."""

    def __init__(self, impl: Any, module: nn.Module, rank: int) -> None:
        self.impl = impl
        self.rank = rank
        self._module = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self._end_step = impl.init_post_optimizer_step_hook(module)

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        seeds = {name: 100 * self.rank + 10 * number + index for index, name in enumerate(LENGTHS)}
        return {name: dyadic(length, seed=seeds[name]) for name, length in LENGTHS.items()}

    def run(self, number: int, *, value: float | None = None) -> Any:
        """Run a round, of all parameters or of the next fragment; return the means of outer gradients.

        If there is a `value`, it is the first element of the outer gradient of "first".
        """
        before, gradients = self.impl.shadow.state_dict()["theta"], self.gradients(number)
        if value is not None:
            gradients["first"][0] = value
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(before[name] - gradients[name])
        self._end_step(self._optimizer)
        after = self.impl.shadow.state_dict()["theta"]
        return {name: theta - after[name] for name, theta in before.items()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.impl.state_dict()["residuals"]
        return state

    def residuals_of_sums(self) -> dict[str, torch.Tensor]:
        """Return this rank's residuals of the sums over ranks, by parameter; empty without error feedback."""
        state = self.state()
        return {name: sent + state["num_ranks"] * state["mean"][name] for name, sent in state.get("sent", {}).items()}

    def bucket_of(self, name: str) -> WeightBucket:
        return next(bucket for bucket in self.impl.rounds.weights if bucket.slices_of([name]))


def on_ranks(
    size: int,
    body: Any,
    *,
    has_feedback: bool = True,
    codec: Compressor | None = BFLOAT16,
    bucket_cap_mb: float = SMALL,
    fragments: int = 1,
) -> list[Any]:
    algorithm = tb.LocalSGDAlgorithm(
        fragments, compression=codec, error_feedback=has_feedback, bucket_cap_mb=bucket_cap_mb, fragments=fragments
    )

    def run(group: dist.ProcessGroup) -> Any:
        module = nn.Module()
        for name, length in LENGTHS.items():
            dtype = torch.float64 if name == "wide" else torch.float32
            module.register_parameter(name, nn.Parameter(torch.zeros(length, dtype=dtype)))
        with running(group, algorithm, module=module) as (_, impl):
            return body(Rounds(impl, module, group.rank()))

    return run_ranks(size, run)


@pytest.mark.parametrize("resets", [False, True])
def test_means_and_residuals_sum_to_the_gradients(resets: bool) -> None:
    """Bitwise, for dyadic gradients; also if buckets are rebuilt between rounds."""

    def body(rounds: Rounds) -> tuple[Any, ...]:
        sent = {name: torch.zeros(length) for name, length in LENGTHS.items()}
        received = {name: torch.zeros(length) for name, length in LENGTHS.items()}
        for number in range(3):
            for name, mean in rounds.run(number).items():
                received[name] += mean
                sent[name] += rounds.gradients(number)[name]
            if resets:
                rounds.impl.reset()
        return sent, received, rounds.residuals_of_sums()

    ranks = on_ranks(2, body)
    for name in ("first", "second"):
        sent, residual = (sum(rank[index][name] for rank in ranks) for index in (0, 2))
        assert residual.any()
        assert torch.equal(2 * ranks[0][1][name] + residual, sent)
    assert "wide" not in ranks[0][2]
    assert torch.equal(2 * ranks[0][1]["wide"], sum(rank[0]["wide"] for rank in ranks))


@pytest.mark.filterwarnings("ignore:torchbagua. .*dropped")
def test_a_round_that_is_dropped_leaves_no_trace() -> None:
    """An applied round commits only its own buckets."""

    def body(rounds: Rounds) -> None:
        rounds.run(0, value=torch.nan if rounds.rank else None)  # of "first", the largest
        assert rounds.impl.num_dropped == 1
        assert not any(residual.any() for residual in rounds.residuals_of_sums().values())
        rounds.run(1)
        after = rounds.residuals_of_sums()
        assert not after["first"].any()
        assert after["second"].any()

    on_ranks(2, body, fragments=len(LENGTHS))


def test_loaded_weights_have_no_residuals() -> None:
    """If a bucket has several weights, only the residuals of the named weights are cleared."""

    def body(rounds: Rounds) -> None:
        rounds.run(0)
        before = rounds.residuals_of_sums()
        assert rounds.bucket_of("first") is rounds.bucket_of("second")
        rounds.impl.weights_loaded({"second": torch.zeros(LENGTHS["second"])})
        after = rounds.residuals_of_sums()
        assert torch.equal(after["first"], before["first"])
        assert before["second"].any()
        assert not after["second"].any()
        rounds.impl.load_state_dict(copy.deepcopy(rounds.impl.state_dict()))
        rounds.impl.weights_loaded({"first": torch.zeros(LENGTHS["first"])})  # before the next round
        assert not any(residual.any() for residual in rounds.residuals_of_sums().values())

    on_ranks(2, body, bucket_cap_mb=1.0)


def test_a_state_continues() -> None:
    """Also with buckets of other sizes."""

    def save(rounds: Rounds) -> tuple[Any, Any]:
        rounds.run(0)
        return copy.deepcopy(rounds.impl.state_dict()), rounds.run(1)

    saved = on_ranks(2, save)

    def load(rounds: Rounds) -> None:
        state, means = saved[rounds.rank]
        rounds.impl.load_state_dict(state)
        for name, mean in rounds.run(1).items():
            assert torch.equal(mean, means[name])

    on_ranks(2, load, bucket_cap_mb=1.0)


def test_residuals_of_other_ranks_or_nodes_are_dropped_with_a_warning() -> None:
    def save(rounds: Rounds) -> Any:
        rounds.run(0)
        return copy.deepcopy(rounds.impl.state_dict())

    saved = on_ranks(2, save)
    for size, nodes, options, attached in (
        (3, "None", {}, r"3 ranks on the nodes None are attached, with compression=InFloat32"),
        (2, "[0, 1]", {}, r"2 ranks on the nodes None are attached, with compression=InFloat32"),
        (2, "None", {"has_feedback": False, "codec": None}, "2 ranks on the nodes None .* compression=None"),
    ):

        def load(rounds: Rounds, nodes: str = nodes) -> None:
            state = saved[rounds.rank % 2]
            rounds.run(0)
            rounds.impl.load_state_dict({**state, "residuals": {**state["residuals"], "nodes": nodes}})
            assert not any(residual.any() for residual in rounds.residuals_of_sums().values())

        by = rf"saved by 2 ranks on the nodes {nodes}".replace("[", r"\[").replace("]", r"\]")
        with pytest.warns(RuntimeWarning, match=f"residuals of error feedback are dropped: .*{by}, but {attached}"):
            on_ranks(size, load, **options)


def test_without_error_feedback_there_are_no_residuals() -> None:
    """Loading such a state drops nothing."""

    def body(rounds: Rounds) -> Any:
        rounds.run(0)
        return copy.deepcopy(rounds.impl.state_dict())

    saved = on_ranks(2, body, has_feedback=False)
    assert [state["residuals"] for state in saved] == [
        {"rank": rank, "num_ranks": 2, "nodes": "None"} for rank in range(2)
    ]

    def load(rounds: Rounds) -> None:
        rounds.impl.load_state_dict(saved[rounds.rank])
        assert rounds.state().keys() == {"rank", "num_ranks", "nodes", "sent", "mean"}

    on_ranks(2, load)


def test_a_state_of_another_rank_of_the_same_world_size_is_refused() -> None:
    algorithm = tb.DiLoCoAlgorithm()

    def body(rounds: Rounds) -> None:
        state, group, rank = rounds.impl.state_dict(), rounds.impl.runner.process_group, rounds.rank

        def check(**residuals: Any) -> None:
            algorithm.check_state({}, {**state, "residuals": residuals}, group)

        check(rank=rank, num_ranks=2, nodes="None")
        check(rank=1 - rank, num_ranks=3, nodes="None")
        with pytest.raises(
            ValueError, match=rf"^DiLoCo\w*\..* be from rank {rank} of 2, got a state from rank {1 - rank} of 2"
        ):
            check(rank=1 - rank, num_ranks=2, nodes="None")
        with pytest.raises(
            ValueError, match=r"^DiLoCo\w*\..* must have the keys \['nodes', 'num_ranks', 'rank'\], got"
        ):
            check(rank=rank, num_ranks=2)

    on_ranks(2, body)
