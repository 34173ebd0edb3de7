"""TopKAlgorithm: no part of a gradient is lost, few bytes are sent, and bad arguments are refused.

test_bytegrad_feedback.py compares it with an oracle, and tests resuming.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from test_bytegrad_feedback import BLOCKK, TOPK, Loop, equal, tensors, train_told
from torchbagua.codecs import TopK
from training import Branches, Tower, build


@pytest.mark.parametrize(("size", "nodes"), [(2, None), (4, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])])
@pytest.mark.parametrize(("make_model", "algorithm"), [(Tower, TOPK), (Branches, TOPK), (Branches, BLOCKK)])
def test_averaged_gradients_and_residuals_sum_to_the_gradients(
    size: int, nodes: list[int] | None, make_model: type[torch.nn.Module], algorithm: tb.Algorithm
) -> None:
    """Up to float32 rounding: sums over ten steps and all ranks, for each parameter."""
    model = build(make_model)

    def body(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], ...]:
        loop = Loop(group, model, algorithm=algorithm, nodes=nodes, find_unused_parameters=True, bucket_cap_mb=0.01)
        named = {name: p for name, p in loop.ddp.module.named_parameters() if p.requires_grad}
        given = {name: torch.zeros_like(p) for name, p in named.items()}
        got = {name: torch.zeros_like(p) for name, p in named.items()}

        def add(gradient: torch.Tensor, name: str) -> None:
            given[name] += gradient

        for name, parameter in named.items():
            parameter.register_hook(partial(add, name=name))
        with loop.attachment:
            for step in range(10):
                loop.step(step)
                for name, parameter in named.items():
                    got[name] += 0 if parameter.grad is None else parameter.grad
            residuals = loop.residuals()
        return given, got, residuals["sent"], residuals["mean"]

    runs = run_ranks(size, body)
    for name, received in runs[0][1].items():
        assert all(torch.equal(run[1][name], received) for run in runs), "replicas differ"
        gradients = sum(run[0][name] for run in runs) / size
        residual = sum(run[2][name] / size + run[3][name] for run in runs)
        largest = max(run[0][name].abs().max() for run in runs)
        assert torch.allclose(received + residual, gradients, rtol=0, atol=1e-5 * float(largest)), name
        if received.numel() > 400:
            assert (received == 0).float().mean() > 0.5, "most of it is in the residuals"
            assert residual.any()


def test_a_step_that_amp_skips_leaves_no_trace() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, algorithm=TOPK, scale=1024.0)
        with loop.attachment:
            for _ in range(3):
                loop.step()
            before = loop.weights(), tensors(loop.residuals())
            loop.step(factor=torch.inf if group.rank() == 1 else 1.0)
            assert equal(loop.weights(), before[0])
            assert equal(tensors(loop.residuals()), before[1])
            loop.step()
            assert not equal(loop.weights(), before[0])
            assert all(value.isfinite().all() for value in tensors(loop.residuals()))

    run_ranks(2, body)


def test_a_hundredth_of_a_gradient_is_sent_in_far_less_of_its_bytes() -> None:
    # One parameter of 64 blocks, which DDP puts into a separate bucket.
    model = build(lambda: torch.nn.Linear(256, 512, bias=False))

    def body(group: dist.ProcessGroup) -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
        recorder = tb.observe.Recorder()
        with tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), tb.TopKAlgorithm(), observers=[recorder]):
            ddp(torch.randn(3, 256, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()
        return recorder.bytes_sent

    full_bytes = 4 * 256 * 512  # for a two-phase mean over 2 ranks in float32
    for sent in run_ranks(2, body):
        assert int(full_bytes / sent) == 151


def test_a_ratio_of_one_sends_all_elements_in_8_bits() -> None:
    model = build(Tower)
    runs = run_ranks(2, lambda group: train_told(group, model, tb.TopKAlgorithm(1.0), num_steps=1))
    for name, averaged in runs[0].averaged[0].items():
        mean = (runs[0].local[0][name] + runs[1].local[0][name]) / 2
        assert (averaged - mean).abs().max() <= 3 * mean.abs().max() / 254 + 1e-6


def test_ranks_must_agree_on_the_ratio() -> None:
    def body(group: dist.ProcessGroup) -> None:
        tb.TopKAlgorithm(0.01 + group.rank() / 100).reify(group)

    with pytest.raises(ValueError, match=r"TopKAlgorithm's argument ratio.*0\.01.*0\.02"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0.0}, "ratio must be above 0 and at most 1, got 0.0"),
        ({"ratio": 1.5}, "ratio must be above 0 and at most 1, got 1.5"),
        ({"block": 100}, "block must be a multiple of 8 from 8 to 4096, got 100"),
        ({"block": 8192}, "block must be a multiple of 8 from 8 to 4096, got 8192"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^TopKAlgorithm: {message}"):
        tb.TopKAlgorithm(**arguments)


@pytest.mark.parametrize("selection", ["bottom", ["top"]])
def test_an_unknown_selection_is_refused(selection: Any) -> None:
    with pytest.raises(ValueError, match=r"^TopKAlgorithm: selection must be one of \['block', 'top'\], got .*"):
        tb.TopKAlgorithm(selection=selection)


@pytest.mark.parametrize("compression", ["topk", TopK(ratio=0.1), "blockk"])
def test_topk_without_feedback_is_refused(compression: str | TopK) -> None:
    with pytest.raises(ValueError, match=r"^CompressedAllReduceAlgorithm: compression .* needs error_feedback=True"):
        tb.CompressedAllReduceAlgorithm(compression)
