"""DiLoCo: every step is bitwise equal to a one-process oracle built on torch.optim.SGD; properties; saved states."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Normed, Trace, Trainer, Weights, assert_same_weights, check_resume, train, weights_of
from diloco_oracle import check_rounds, fragments_of
from pairwise import pairwise
from ranks import run_ranks
from torchbagua.algorithms.weights.diloco import assign_fragments
from torchbagua.observe import Recorder
from training import build, flat

DiLoCo = tb.DiLoCoAlgorithm
H = 6
MODEL = build(Normed)


def theta_of(attachment: tb.Attachment) -> Weights:
    theta: Weights = attachment.impl.shadow.state_dict()["theta"]
    return theta


@pairwise(size=[2, 4], compression=[None, "minmax_uint4"], fragments=[1, 3], delay=[0, 1], cap_mb=[8.0, 0.001])
def test_rounds_equal_the_oracle(
    device: torch.device, size: int, compression: str | None, fragments: int, delay: int, cap_mb: float
) -> None:
    """The shadow weights equal the oracle's too, and are bitwise equal on all ranks after every step."""
    algorithm = DiLoCo(H, compression=compression, fragments=fragments, delay=delay, bucket_cap_mb=cap_mb)
    model = build(Normed).to(device)
    shadows: list[list[Weights]] = [[] for _ in range(size)]
    found: dict[str, int] = {}

    def body(group: dist.ProcessGroup) -> Trace:
        def after_step(trainer: Trainer, attachment: tb.Attachment) -> None:
            found.update(fragments_of(attachment.runner))
            shadows[group.rank()].append(theta_of(attachment))

        return train(group, model, algorithm, num_steps=2 * H + 3, lr=0.01, after_step=after_step)

    traces = run_ranks(size, body, device=device)
    rounds = check_rounds(traces, algorithm, found)
    for thetas in zip(*shadows, strict=True):
        assert_same_weights(thetas)
    for name, theta in shadows[0][-1].items():
        np.testing.assert_array_equal(flat(theta), flat(rounds.theta[name]), name)
    assert_same_weights([trace.final for trace in traces])


def test_local_sgd_is_diloco_with_the_mean_of_weights() -> None:
    traces = run_ranks(2, lambda group: train(group, MODEL, tb.LocalSGDAlgorithm(2, compression=None), lr=0.01))
    names = dict.fromkeys(traces[0].start[0], 0)
    check_rounds(traces, DiLoCo(2, 1.0, 0.0, nesterov=False, compression=None), names)


class Fading(nn.Module):
    """A weight with a gradient in the first four forwards, and zeros as gradient in all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(10.0) / 8)
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return (self.weight * x).sum() / 64 if self.num_forwards <= 4 else (0 * self.weight).sum()


def test_an_all_zero_mean_leaves_weights_and_momentum_unchanged_as_in_the_oracle() -> None:
    """A rounding error alone can be all that changes a weight, such as a bias before a BatchNorm, and then be zero."""
    algorithm = DiLoCo(2, compression=None)

    def body(group: dist.ProcessGroup) -> Trace:
        def make_optimizers(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(module.parameters(), lr=lr)]

        return train(group, Fading(), algorithm, num_steps=10, lr=0.01, make_optimizers=make_optimizers)

    traces = run_ranks(2, body)
    check_rounds(traces, algorithm, {"weight": 0})
    before, *after = (weights["weight"] for weights in traces[0].start[4::2])
    assert len(after) == 3
    assert not torch.equal(before, traces[0].start[2]["weight"])
    assert all(torch.equal(weight, before) for weight in after)


@pytest.mark.parametrize(
    ("algorithm", "stop", "nodes"),
    [
        (DiLoCo(3, delay=2), 4, None),
        (DiLoCo(6, fragments=3, delay=1), 4, None),
        pytest.param(DiLoCo(3, delay=2), 3, [0, 0, 1, 1], marks=pytest.mark.release),
        pytest.param(DiLoCo(4, fragments=2, delay=1, compression=None), 5, [0, 0, 1, 1], marks=pytest.mark.release),
    ],
)
def test_a_run_resumes_bit_for_bit(algorithm: tb.DiLoCoAlgorithm, stop: int, nodes: list[int] | None) -> None:
    """With a round in flight, after others of other fragments; into other buckets."""
    resumed = dataclasses.replace(algorithm, bucket_cap_mb=0.001)

    def body(group: dist.ProcessGroup) -> None:
        check_resume(group, MODEL, algorithm, resumed, stop, nodes=nodes, lr=0.01)

    run_ranks(2 if nodes is None else 4, body)


@contextmanager
def training(group: dist.ProcessGroup, algorithm: Any, num_steps: int) -> Iterator[tuple[Trainer, tb.Attachment]]:
    trainer = Trainer(group, MODEL, lr=0.01)
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
        take_steps(trainer, num_steps)
        yield trainer, attachment


def take_steps(trainer: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        trainer.step()


def states_of(size: int, algorithm: Any, num_steps: int = 4) -> list[dict[str, Any]]:
    def save(group: dist.ProcessGroup) -> dict[str, Any]:
        with training(group, algorithm, num_steps) as (_, attachment):
            return copy.deepcopy(attachment.rank_state_dict())

    return run_ranks(size, save)


def test_a_loaded_round_is_applied_before_another_begins() -> None:
    """It was due after step 14; with the new schedule, the next round begins after step 12."""
    first, second = (
        tb.LocalSGDAlgorithm(inner_steps, compression=None, delay=4, final_average=False) for inner_steps in (10, 6)
    )
    states = states_of(2, first, 11)

    def load(group: dist.ProcessGroup) -> None:
        with training(group, second, 0) as (trainer, attachment):
            attachment.load_rank_state_dict(states[group.rank()])
            trainer.step()
            assert attachment.impl.rounds.num_rounds == 2
            differences = states[group.rank()]["attachment"]["impl"]["differences"]
            for name, parameter in trainer.module.named_parameters():
                if parameter.requires_grad:
                    assert differences[name].any()
                    assert torch.equal(parameter, trainer.trace.updated[-1][name] + differences[name])

    run_ranks(2, load)


def test_a_state_of_another_world_size() -> None:
    """The shared state is loaded, and each rank loads a worker's weights."""
    algorithm = DiLoCo(3, delay=2)
    saved = states_of(2, algorithm)

    def load(group: dist.ProcessGroup) -> Weights:
        rank = group.rank()
        with training(group, algorithm, 0) as (trainer, attachment):
            mismatched, before = copy.deepcopy(saved[0]), weights_of(trainer.module)
            mismatched["attachment"]["impl"]["residuals"] |= {"rank": 3, "num_ranks": 3}
            with pytest.raises(ValueError, match=rf"from rank {rank} of 3, got a state from rank 3"):
                attachment.load_rank_state_dict(mismatched)
            assert_same_weights([before, weights_of(trainer.module)])
            attachment.load_rank_state_dict(saved[rank % 2])
            assert attachment.impl.rounds.step == 4
            assert_same_weights([theta_of(attachment), saved[0]["attachment"]["impl"]["theta"]])
            take_steps(trainer, 2)
            return theta_of(attachment)

    with pytest.warns(
        RuntimeWarning, match="start again on rank 2: the state was saved by rank 0 of 2, and 3 ranks are"
    ):
        assert_same_weights(run_ranks(3, load))


def test_a_state_of_a_single_rank() -> None:
    """It trained alone: all ranks start from its weights."""
    algorithm = DiLoCo(3, delay=1)
    (state,) = states_of(1, algorithm)

    def load(group: dist.ProcessGroup) -> None:
        with training(group, algorithm, 2) as (trainer, attachment):
            attachment.load_rank_state_dict(copy.deepcopy(state))
            theta = theta_of(attachment)
            assert_same_weights([theta, state["module"], weights_of(trainer.module)])
            take_steps(trainer, 3)
            assert (attachment.impl.rounds.step, attachment.impl.rounds.num_rounds) == (7, 1)
            assert not torch.equal(theta_of(attachment)["last.bias"], theta["last.bias"])

    run_ranks(2, load)


@pytest.mark.parametrize(
    ("saved", "attached", "nodes"),
    [
        ("minmax_uint4", None, "None"),
        (None, "minmax_uint4", "None"),
        ("topk", "sign1bit", "None"),
        ("minmax_uint4", "minmax_uint4", "[0, 1]"),
    ],
)
def test_a_state_of_another_codec_or_nodes(saved: str | None, attached: str | None, nodes: str) -> None:
    """Residuals are loaded; with compression=None, or of other nodes, they are dropped with a warning."""
    drops = attached is None or nodes != "None"

    def body(group: dist.ProcessGroup) -> None:
        with training(group, DiLoCo(3, compression=saved), 4) as (_, attachment):
            state = copy.deepcopy(attachment.state_dict())
        state["impl"]["residuals"]["nodes"] = nodes
        with training(group, DiLoCo(3, compression=attached), 0) as (trainer, attachment):
            attachment.load_state_dict(state)
            impl = attachment.state_dict()["impl"]
            assert_same_weights([impl["theta"], state["impl"]["theta"]])
            for kind, residuals in impl["residuals"].items():
                if kind in ("sent", "mean"):
                    has_them = [bool(residual.any()) for residual in residuals.values()]
                    assert any(has_them) != (drops or saved is None)
                    if any(has_them):
                        assert_same_weights([state["impl"]["residuals"][kind], residuals])
            take_steps(trainer, 2)
            assert attachment.impl.rounds.num_rounds == 2

    dropped = rf"residuals of error feedback are dropped: .* 2 ranks on the nodes {re.escape(nodes)}, but .* None "
    with pytest.warns(RuntimeWarning, match=dropped) if drops else nullcontext():
        run_ranks(2, body)


def test_a_state_of_other_arguments_or_weights() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with training(group, DiLoCo(), 0) as (trainer, attachment):
            state = attachment.state_dict()
            with pytest.raises(ValueError, match=r"state must have the keys \[.*'step'.*\], got \['step'\]"):
                attachment.load_state_dict({**state, "impl": {"step": 3}})
            with pytest.raises(ValueError, match="the weights of this module, 6 tensors, got 1; they differ in"):
                attachment.load_state_dict({**state, "impl": {**state["impl"], "theta": {"a": torch.zeros(3)}}})
        apart = copy.deepcopy(state)
        apart["impl"]["theta"]["last.bias"] += group.rank()
        with (
            pytest.raises(tb.CommunicationError, match=r"loading the state: .* a digest of the shadow weights"),
            tb.attach(trainer.ddp, trainer.optimizer, DiLoCo()) as attachment,
        ):
            attachment.load_state_dict(apart)
        for arguments in ({"outer_lr": 0.5}, {"fragments": 2}, {"error_feedback": False}, {"outer_optimizer": adam}):
            with (
                tb.attach(trainer.ddp, trainer.optimizer, DiLoCo(**arguments)) as attachment,
                pytest.raises(ValueError, match=f"the state was saved with {next(iter(arguments))}="),
            ):
                attachment.load_state_dict(state)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inner_steps": 0}, ValueError, "inner_steps must be at least 1, got 0"),
        ({"inner_steps": 2.5}, TypeError, r"inner_steps must be an integer, got 2\.5"),
        ({"fragments": 0}, ValueError, "fragments must be at least 1, got 0"),
        ({"delay": -1}, ValueError, "delay must be at least 0, got -1"),
        ({"delay": 10, "fragments": 3}, ValueError, "delay must be less than inner_steps / .*, 30 / 3, .*got 10"),
        ({"outer_lr": -1.0}, ValueError, r"outer_lr must be at least 0, got -1\.0"),
        ({"outer_momentum": 1}, ValueError, "outer_momentum must be less than 1, .*got 1"),
        ({"outer_momentum": "much"}, TypeError, "outer_momentum must be a number, got 'much'"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
        ({"outer_optimizer": 0.7}, TypeError, r"outer_optimizer must be None or a function .* got 0\.7"),
        ({"outer_optimizer": lambda _: None}, TypeError, "outer_optimizer must be a function that can be imported"),
        ({"compression": "none"}, ValueError, "compression must be None, a Compressor or one of"),
        ({"compression": "topk", "error_feedback": False}, ValueError, "compression 'topk' needs error_feedback=True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"DiLoCoAlgorithm: {message}"):
        DiLoCo(**arguments)


def no_optimizer(shadows: list[torch.Tensor]) -> Any:
    return shadows


def optimizer_of_other_tensors(shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*shadows[1:], torch.zeros(3)], lr=0.1)


def adam(shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [shadow for shadow in shadows if (shadow.dim() > 1) == is_matrix]} for is_matrix in (True, False)
    ]
    return torch.optim.Adam(groups, lr=0.01)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"outer_optimizer": no_optimizer}, TypeError, r"outer_optimizer must return a torch.optim.Optimizer, got"),
        (
            {"outer_optimizer": optimizer_of_other_tensors},
            ValueError,
            "must return an optimizer of the 6 given tensors, got .* of 6 tensors, including 5 of",
        ),
        ({"fragments": 7}, ValueError, "fragments must be at most the number of trained parameters, 6, got 7"),
    ],
)
def test_arguments_that_do_not_fit_the_module(arguments: Any, error: type[Exception], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL)
        with pytest.raises(error, match=message):
            tb.attach(trainer.ddp, trainer.optimizer, DiLoCo(**arguments))
        trainer.step()  # the failed attach left nothing behind

    run_ranks(2, body)


def overflow(weight: torch.Tensor, value: float) -> None:
    assert weight.grad is not None
    weight.grad[0, 0] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_end_warns_of_dropped_rounds_and_of_weights_that_are_not_finite(value: float) -> None:
    """The last mean spreads the NaN of one rank to all ranks."""

    def body(group: dist.ProcessGroup) -> None:
        with training(group, DiLoCo(1, compression=None), 0) as (trainer, _):
            if group.rank() == 1:  # only this weight becomes infinite in the first step
                change = partial(overflow, value=-value)
                trainer.module.first.weight.register_post_accumulate_grad_hook(change)
            take_steps(trainer, 3)

    with pytest.warns(RuntimeWarning, match="NaN or Inf") as caught:
        run_ranks(2, body)
    expected = "weights contained NaN or Inf: 3 in total. If the weights are not finite now, load a checkpoint"
    assert sum(expected in str(warning.message) for warning in caught) == 2


def test_a_user_defined_outer_optimizer() -> None:
    """Ranks compare its name; a resumed run restores its groups and its state."""
    algorithm = DiLoCo(2, outer_optimizer=adam)
    assert f"outer_optimizer={__name__}.adam" in repr(algorithm)
    assert copy.deepcopy(algorithm) == algorithm
    run_ranks(2, lambda group: check_resume(group, MODEL, algorithm, algorithm, 3, lr=0.01))


def test_unfrozen_layers_and_ranks_that_start_from_different_weights() -> None:
    """All ranks start from the same theta, and a round in flight is applied before buckets are rebuilt."""

    def body(group: dist.ProcessGroup) -> tuple[list[Weights], list[torch.Tensor]]:
        trainer = Trainer(group, MODEL, lr=0.01)
        second_optimizer = torch.optim.SGD(trainer.module.frozen.parameters(), lr=0.01)
        shadows, momenta = [], []
        with torch.no_grad():
            trainer.module.last.weight.add_(group.rank())
        algorithm = DiLoCo(4, fragments=2, delay=1)
        with tb.attach(trainer.ddp, [trainer.optimizer, second_optimizer], algorithm) as attachment:
            for step in range(10):
                trainer.module.frozen.requires_grad_(step >= 4)  # the round of the second fragment is in flight
                trainer.step()
                second_optimizer.step()
                shadows.append(theta_of(attachment))
                momenta.append(attachment.impl.shadow.state_dict()["outer"]["state"]["first.weight"]["momentum_buffer"])
        return shadows, momenta

    ranks = run_ranks(2, body)
    for thetas in zip(*(shadows for shadows, _ in ranks), strict=True):
        assert_same_weights(thetas)
    shadows, momenta = ranks[0]
    assert "frozen.weight" not in shadows[3]
    assert not torch.equal(shadows[4]["frozen.weight"], shadows[9]["frozen.weight"])
    assert momenta[3].any()
    assert torch.equal(momenta[3], momenta[4])


def test_rounds_are_traced() -> None:
    """Only steps of rounds have messages, and buckets name fragments."""
    model, num_elements = build(lambda: nn.Linear(10, 333)), 3663

    def body(group: dist.ProcessGroup) -> tuple[list[Any], str]:
        recorder, algorithm = Recorder(), DiLoCo(4, fragments=2, delay=1, final_average=False)
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm, observers=[recorder]) as attachment:
            take_steps(trainer, 8)
            text = str(attachment.summary())
        return recorder.events, text

    for events, text in run_ranks(2, body):
        assert "DiLoCoAlgorithm" in text
        assert re.search(r"rank \d: 3 rounds, each applied 1.0 steps after its snapshot; .* [\d.]+ ms a round", text)
        buckets = [event.bucket for event in events if event.phase == "bucket"]
        assert buckets == ["fragment 0 weight bucket 0", "fragment 1 weight bucket 1"] * 2
        applied = [event.values for event in events if event.phase == "apply" and event.values]
        assert [values["fragment"] for values in applied] == [0, 1, 0, 1]
        assert [values["rounds"] for values in applied] == [1, 2, 3, 4]
        assert [values["staleness in steps"] for values in applied] == [1, 1, 1, 0], "the last one by detach"
        # Two rounds of all elements in 4.25 bits, half of them sent in each phase, and values that ranks compare first.
        payload = sum(event.wire_bytes for event in events if event.phase == "send" and event.num_elements)
        assert 2 * num_elements * 4.25 / 8 <= payload <= 2 * num_elements * 4.25 / 8 * 1.05


def test_fragments_have_about_equal_bytes() -> None:
    sizes = [7, 1000, 3, 400, 400, 90, 5, 64]
    tensors = [tb.extend.BaguaTensor(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]
    found = assign_fragments(tensors, 3)
    assert found.keys() == {str(index) for index in range(8)}
    in_each = [sum(sizes[int(name)] for name in found if found[name] == fragment) for fragment in range(3)]
    assert sorted(in_each) == [479, 490, 1000]
    assert set(assign_fragments(tensors, 8).values()) == set(range(8))


# Two inner optimizers: Muon for matrices, AdamW for the other parameters.


def make_muon_and_adamw(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the trained matrices, and AdamW for the other trained parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        torch.optim.Muon([p for p in trained if p.ndim == 2], lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in trained if p.ndim != 2], lr=lr),
    ]


def make_adamw_and_muon(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the same optimizers in the other order, in which they then step."""
    return make_muon_and_adamw(module, lr)[::-1]


@pytest.mark.parametrize(("make_optimizers", "delay"), [(make_muon_and_adamw, 0), (make_adamw_and_muon, 1)])
def test_rounds_of_two_inner_optimizers_equal_the_oracle(
    make_optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]], delay: int
) -> None:
    """A round contains the updates of both optimizers. Without a delay, ranks have equal weights after it."""
    algorithm, model = tb.DiLoCoAlgorithm(3, delay=delay), build(Normed)
    found: dict[str, int] = {}

    def body(group: dist.ProcessGroup) -> Trace:
        def after_step(trainer: Trainer, attachment: tb.Attachment) -> None:
            found.update(fragments_of(attachment.runner))

        return train(
            group, model, algorithm, num_steps=8, lr=0.01, make_optimizers=make_optimizers, after_step=after_step
        )

    traces = run_ranks(2, body)
    check_rounds(traces, algorithm, found)
    for step in (2, 3, 5, 6):
        first, second = (trace.start[step] for trace in traces)
        is_after_round = delay == 0 and step % 3 == 0
        for name in ("first.weight", "first.bias"):  # of Muon, and of AdamW
            assert torch.equal(first[name], second[name]) == is_after_round, (step, name)


def make_with_reversed_parameters(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `make_muon_and_adamw`, but AdamW with its parameters in the other order."""
    muon, adamw = make_muon_and_adamw(module, lr)
    return [muon, torch.optim.AdamW(adamw.param_groups[0]["params"][::-1], lr=lr)]


@pytest.mark.parametrize(
    ("make_optimizers", "given"),
    [
        (make_adamw_and_muon, "AdamW (first.bias and 3 more), Muon (first.weight and 1 more)"),
        (make_with_reversed_parameters, "Muon (first.weight and 1 more), AdamW (last.bias and 3 more)"),
    ],
)
def test_a_state_of_other_optimizers_is_refused(
    make_optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]], given: str
) -> None:
    """torch matches optimizer states by position. A state of an earlier release, without names, is loaded."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01, make_optimizers=make_muon_and_adamw)
        with tb.attach(trainer.ddp, trainer.optimizers, tb.DiLoCoAlgorithm(3)) as attachment:
            trainer.step()
            state = attachment.rank_state_dict()
            described = json.loads(state["attachment"]["algorithm"])
            del described["loop"]
            earlier = {**state, "attachment": {**state["attachment"], "algorithm": json.dumps(described)}}
            attachment.load_rank_state_dict(earlier)
        other = Trainer(group, model, lr=0.01, make_optimizers=make_optimizers)
        saved = "Muon (first.weight and 1 more), AdamW (first.bias and 3 more)"
        with tb.attach(other.ddp, other.optimizers, tb.DiLoCoAlgorithm(3)) as attachment:
            with pytest.raises(ValueError, match=re.escape(f"the state has {saved}, but attach was given {given}.")):
                attachment.load_rank_state_dict(state)
            assert_same_weights([weights_of(other.module), weights_of(model)])

    run_ranks(2, body)
