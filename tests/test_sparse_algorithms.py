"""TopKAlgorithm and RandomKAlgorithm: nothing of a gradient is lost, few bytes are sent, and what they refuse.

Their oracle, and resuming, are in test_bytegrad_feedback.py.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from test_bytegrad_feedback import RANDOMK, TOPK, Loop, equal, tensors, train_told
from torchbagua.codecs import TopK
from training import Branches, Tower, build


@pytest.mark.parametrize(("size", "nodes"), [(2, None), (4, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])])
@pytest.mark.parametrize(("make_model", "algorithm"), [(Tower, TOPK), (Branches, TOPK), (Branches, RANDOMK)])
def test_what_was_sent_and_the_residuals_are_the_gradients(
    size: int, nodes: list[int] | None, make_model: type[torch.nn.Module], algorithm: tb.Algorithm
) -> None:
    """To float32 rounding: the sums of ten steps over all ranks, parameter by parameter."""
    model = build(make_model)

    def body(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], ...]:
        loop = Loop(group, model, algorithm=algorithm, nodes=nodes, find_unused_parameters=True, bucket_cap_mb=0.01)
        named = {name: p for name, p in loop.ddp.module.named_parameters() if p.requires_grad}
        given = {name: torch.zeros_like(p) for name, p in named.items()}
        got = {name: torch.zeros_like(p) for name, p in named.items()}

        def note(gradient: torch.Tensor, name: str) -> None:
            given[name] += gradient

        for name, parameter in named.items():
            parameter.register_hook(partial(note, name=name))
        with loop.attachment:
            for step in range(10):
                loop.step(step)
                for name, parameter in named.items():
                    got[name] += 0 if parameter.grad is None else parameter.grad
            held = loop.residuals()
        return given, got, held["sent"], held["mean"]

    runs = run_ranks(size, body)
    for name, received in runs[0][1].items():
        assert all(torch.equal(run[1][name], received) for run in runs), "replicas differ"
        gradients = sum(run[0][name] for run in runs) / size
        left_out = sum(run[2][name] / size + run[3][name] for run in runs)
        largest = max(run[0][name].abs().max() for run in runs)
        assert torch.allclose(received + left_out, gradients, rtol=0, atol=1e-5 * float(largest)), name
        if received.numel() > 400:
            assert (received == 0).float().mean() > 0.5, "most of it is in the residuals"
            assert left_out.any()


def test_a_gradient_of_which_only_zeros_are_drawn_waits() -> None:
    """The average is zero then, as in a gradient that DDP has left alone."""
    model = torch.nn.Embedding(64, 1)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        with tb.attach(ddp, optimizer, tb.RandomKAlgorithm(0.02)) as attachment:
            for _ in range(6):
                optimizer.zero_grad()
                ddp(torch.tensor([5])).sum().backward()
                optimizer.step()
            waiting: torch.Tensor = attachment.impl.state_dict()["sent"]["weight"]
        return model.weight.detach() - ddp.module.weight.detach() + waiting

    every_step = torch.zeros(64, 1)
    every_step[5] = 6.0
    for moved_and_waiting in run_ranks(2, body):
        torch.testing.assert_close(moved_and_waiting, every_step, rtol=1e-6, atol=0)  # of rounding in float32


@pytest.mark.parametrize("algorithm", [TOPK, RANDOMK], ids=lambda algorithm: type(algorithm).__name__)
def test_a_step_that_amp_skips_leaves_no_trace(algorithm: tb.Algorithm) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, algorithm=algorithm, scale=1024.0)
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


@pytest.mark.parametrize(("algorithm", "times_less"), [(tb.TopKAlgorithm(), 151), (tb.RandomKAlgorithm(), 327)])
def test_a_hundredth_of_a_gradient_is_sent_in_far_less_of_its_bytes(algorithm: tb.Algorithm, times_less: int) -> None:
    # One parameter of 64 blocks, which DDP sends in a bucket of its own.
    model = build(lambda: torch.nn.Linear(256, 512, bias=False))

    def body(group: dist.ProcessGroup) -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
        recorder = tb.observe.Recorder()
        with tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), algorithm, observers=[recorder]):
            ddp(torch.randn(3, 256, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()
        return recorder.bytes_sent

    full_bytes = 4 * 256 * 512  # of a two-phase mean of 2 ranks in float32
    for sent in run_ranks(2, body):
        assert int(full_bytes / sent) == times_less


@pytest.mark.parametrize("algorithm", [tb.TopKAlgorithm(1.0), tb.RandomKAlgorithm(1.0)], ids=repr)
def test_of_all_elements_8_bits_are_sent(algorithm: tb.Algorithm) -> None:
    model = build(Tower)
    runs = run_ranks(2, lambda group: train_told(group, model, algorithm, num_steps=1))
    for name, averaged in runs[0].averaged[0].items():
        mean = (runs[0].local[0][name] + runs[1].local[0][name]) / 2
        assert (averaged - mean).abs().max() <= 3 * mean.abs().max() / 254 + 1e-6


def test_ranks_must_agree_on_the_seed() -> None:
    def body(group: dist.ProcessGroup) -> None:
        tb.RandomKAlgorithm(seed=group.rank()).reify(group)

    with pytest.raises(ValueError, match=r"RandomKAlgorithm's argument seed.*0.*1"):
        run_ranks(2, body)


def test_ranks_must_agree_on_the_ratio() -> None:
    def body(group: dist.ProcessGroup) -> None:
        tb.TopKAlgorithm(0.01 + group.rank() / 100).reify(group)

    with pytest.raises(ValueError, match=r"TopKAlgorithm's argument ratio.*0\.01.*0\.02"):
        run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [tb.TopKAlgorithm, tb.RandomKAlgorithm])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0.0}, "ratio must be above 0 and at most 1, got 0.0"),
        ({"ratio": 1.5}, "ratio must be above 0 and at most 1, got 1.5"),
        ({"block": 100}, "block must be a multiple of 8 from 8 to 4096, got 100"),
        ({"block": 8192}, "block must be a multiple of 8 from 8 to 4096, got 8192"),
    ],
)
def test_arguments_that_are_refused(algorithm: type[tb.Algorithm], arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{algorithm.__name__}: {message}"):
        algorithm(**arguments)


@pytest.mark.parametrize("selection", ["bottom", ["top"]])
def test_a_selection_that_there_is_not_is_refused(selection: Any) -> None:
    with pytest.raises(ValueError, match=r"^TopKAlgorithm: selection must be one of \['block', 'top'\], got .*"):
        tb.TopKAlgorithm(selection=selection)


@pytest.mark.parametrize("compression", ["topk", TopK(ratio=0.1), "blockk"])
def test_topk_without_feedback_is_refused(compression: str | TopK) -> None:
    with pytest.raises(ValueError, match=r"^CompressedAllReduceAlgorithm: compression .* needs error_feedback=True"):
        tb.CompressedAllReduceAlgorithm(compression)
