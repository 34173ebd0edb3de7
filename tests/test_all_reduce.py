"""GradientAllReduce with the backend's own all-reduce: bitwise equal to torch's own hook, on private connections."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from training import Branches, OneElement, Run, Tower, Wide, build, train
from transports import MessagesAlone

SEVERAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {
    "several buckets": (Tower, {"bucket_cap_mb": 0.01}),
    "mixed dtypes": (lambda: Tower(dtypes=SEVERAL_DTYPES), {"bucket_cap_mb": 0.01}),
    "float64 and complex": (Wide, {"bucket_cap_mb": 0.01}),
    "unused parameters": (Branches, {"find_unused_parameters": True, "bucket_cap_mb": 0.005}),
    "one element": (OneElement, {}),
}


def check_same_gradients(runs: list[Run], expected_runs: list[Run]) -> None:
    for run, expected in zip(runs, expected_runs, strict=True):
        for step, averaged in enumerate(run.averaged):
            assert averaged.keys() == expected.averaged[step].keys()
            for name, gradient in averaged.items():
                assert torch.equal(gradient, expected.averaged[step][name]), f"step {step}, {name}"


@pytest.mark.parametrize(
    ("scenario", "size"), [*((scenario, 3) for scenario in SCENARIOS), *(("mixed dtypes", size) for size in (1, 2, 5))]
)
def test_gradients_equal_those_of_torchs_hook(scenario: str, size: int) -> None:
    make_model, options = SCENARIOS[scenario]
    model = build(make_model)
    by_torch, own = (
        run_ranks(size, lambda group, algorithm=algorithm: train(group, model, algorithm, num_steps=3, **options))
        for algorithm in (None, tb.GradientAllReduceAlgorithm())
    )
    check_same_gradients(own, by_torch)


@pytest.mark.parametrize(("size", "is_equal"), [(3, False), (4, True)])
def test_weights_equal_those_of_plain_ddp_for_powers_of_two(size: int, is_equal: bool) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        weights = []
        for attaches in (False, True):
            ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            if attaches:
                tb.attach(ddp, optimizer, "gradient_allreduce")
            data = torch.Generator().manual_seed(group.rank())
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.randn(6, 10, generator=data), 0).square().sum().backward()
                optimizer.step()
            weights.append(torch.nn.utils.parameters_to_vector(ddp.parameters()))
        return torch.equal(*weights)

    assert run_ranks(size, body) == [is_equal] * size


def test_a_sum_is_not_divided() -> None:
    """With two ranks the mean is exactly half of the sum."""
    model = build(Tower)
    sums, means = (
        run_ranks(2, lambda group, algorithm=algorithm: train(group, model, algorithm, num_steps=1))[0].averaged[0]
        for algorithm in map(partial(tb.GradientAllReduceAlgorithm, False), (False, True))
    )
    assert all(torch.equal(2 * mean, sums[name]) for name, mean in means.items())


def test_a_transport_with_only_messages_reduces_in_rank_order() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup, in_rank_order: bool) -> Run:
        own = None if in_rank_order else tb.BaguaProcessGroup(group, transport=MessagesAlone)
        algorithm = tb.GradientAllReduceAlgorithm(in_rank_order=in_rank_order)
        return train(group, model, algorithm, own_group=own, bucket_cap_mb=0.01)

    check_same_gradients(*(run_ranks(3, partial(body, in_rank_order=in_rank_order)) for in_rank_order in (False, True)))


def test_a_state_is_bound_to_the_order_of_sums() -> None:
    def body(group: dist.ProcessGroup) -> None:
        state = None
        for algorithm in (tb.GradientAllReduceAlgorithm(), tb.GradientAllReduceAlgorithm(hierarchical=True)):
            ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
            with tb.attach(ddp, torch.optim.SGD(ddp.parameters()), algorithm) as attachment:
                if state is None:
                    state = attachment.state_dict()
                    continue
                with pytest.raises(ValueError, match=r"saved with in_rank_order=False, .* has in_rank_order=True"):
                    attachment.load_state_dict(state)

    run_ranks(2, body)


def mean_of_weights(group: dist.ProcessGroup, flat: torch.Tensor, **options: Any) -> torch.Tensor:
    tensors = [tb.extend.BaguaTensor("w", flat)]
    bucket = tb.extend.BaguaBucket("b", tensors, tb.BaguaProcessGroup(group), flat.clone())
    return bucket.append_asynchronous_model_average_op(**options).run()


def test_the_mean_of_snapshots_is_the_backends_sum_divided() -> None:
    def body(group: dist.ProcessGroup) -> None:
        snapshot = torch.randn(3000, generator=torch.Generator().manual_seed(group.rank()))
        copied = snapshot.clone()
        mean = mean_of_weights(group, torch.zeros(3000), snapshot=snapshot)
        assert torch.equal(snapshot, copied)
        dist.all_reduce(copied, group=group)
        assert torch.equal(mean, copied / 3.0)

    run_ranks(3, body)


def test_weights_in_bfloat16_are_summed_in_float32() -> None:
    """A backend would round the sum of four values at every addition. Here the mean, 1 + 3 / 256, is rounded once."""

    def body(group: dist.ProcessGroup) -> None:
        mean = mean_of_weights(group, torch.tensor([4.0 if group.rank() == 0 else 2**-6], dtype=torch.bfloat16))
        assert mean.item() == torch.tensor((4.0 + 3 * 2**-6) / 4).bfloat16().item() != 1.0

    run_ranks(4, body)
