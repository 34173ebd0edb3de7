"""DiLoCo with two inner optimizers: Muon for matrices, AdamW for the other parameters."""

import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Normed, Trace, Trainer, assert_same_weights, train, weights_of
from diloco_oracle import check_rounds, fragments_of
from ranks import run_ranks
from training import build


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
def test_rounds_equal_the_oracle(
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
