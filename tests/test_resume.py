"""Resume of a weight algorithm: states of asynchronous averaging, of frozen layers, and in distributed checkpoints.

test_life.py resumes each algorithm.
"""

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import programs
import torchbagua as tb
from averaging import ALGORITHMS, Normed, Trainer, assert_same_weights, weights_of
from ranks import on_each_rank, run_ranks
from training import build

MODEL = build(Normed)
STOP, END = 4, 7


def checkpoint(trainer: Trainer, attachment: tb.Attachment) -> dict[str, Any]:
    """Return the checkpoint of a rank; with an interval of 1, a round is in flight."""
    return {
        "attachment": attachment.state_dict(),
        "model": trainer.module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "data": trainer.data.get_state(),
    }


def resume(trainer: Trainer, attachment: tb.Attachment, state: dict[str, Any]) -> None:
    """Load each rank's own weights, after DDP has wrapped the model and broadcast the weights of rank 0."""
    trainer.module.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.data.set_state(state["data"])
    attachment.load_state_dict(state["attachment"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shift_one", "diloco", "own outer optimizer"])
def test_resume_from_a_distributed_checkpoint(tmp_path: Path, name: str) -> None:
    """Real processes, and one checkpoint with separate keys for each rank; weights always differ between ranks."""
    script = Path(__file__).with_name("checkpoint_rank.py")
    digests = []
    for mode in ("save", "resume"):
        run = programs.run(programs.forked_ranks(script, mode, str(tmp_path / "checkpoint"), name))
        digests.append(sorted(re.findall(r"rank \d digest [0-9a-f]{64}", run.stdout)))
    assert len(digests[0]) == 2
    assert digests[0][0].split()[-1] != digests[0][1].split()[-1]
    assert digests[1] == digests[0]


@on_each_rank(2)
def test_async_resumes_its_steps_and_its_state(group: dist.ProcessGroup) -> None:
    """And the differences of a layer that was unfrozen."""
    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=3)
    first = Trainer(group, MODEL, lr=0.001)
    states = []
    with tb.attach(first.ddp, first.optimizer, algorithm) as attachment:
        for step in range(6):
            first.step()
            if step in (1, 4):
                states.append(copy.deepcopy(checkpoint(first, attachment)))
        first.module.frozen.requires_grad_(True)
        first.step()
        attachment.impl.abort(first.ddp)  # ranks may save in different rounds otherwise
        states.append(copy.deepcopy(checkpoint(first, attachment)))

    for state, expected in zip(states, ("warm-up", "running", "stopped"), strict=True):
        second = Trainer(group, MODEL, lr=0.001)
        with tb.attach(second.ddp, second.optimizer, algorithm) as attachment:
            resume(second, attachment, state)
            assert attachment.impl.mode == expected
            if expected == "stopped":
                assert_same_weights([state["model"], second.module.state_dict()])
            assert attachment.impl.step == state["attachment"]["impl"]["step"]
            second.step()
            second.step()
            if expected == "stopped":
                assert "frozen.weight" in attachment.state_dict()["impl"]["differences"]
                attachment.impl.resume(second.ddp)
            assert attachment.impl.mode == "running"


@on_each_rank(2)
def test_rounds_before_loading_do_not_change_the_weights_that_async_loads(group: dist.ProcessGroup) -> None:
    """Rounds run from attach on; the weights of a rank that loads later must still equal the checkpoint."""
    trainer = Trainer(group, MODEL)
    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, final_average=False)
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
        state = checkpoint(trainer, attachment)
        state["attachment"]["impl"].update(has_differences=False)
        state["model"] = {key: torch.full_like(value, 10) for key, value in state["model"].items()}
        time.sleep(0.2 * group.rank())
        resume(trainer, attachment, state)
        for value in weights_of(trainer.module).values():
            assert torch.equal(value, torch.full_like(value, 10))


# Before which step a layer begins to be trained or no longer is, by event.
UNFROZEN = {"unfreeze": 2, "unfreeze late": STOP, "freeze the next": STOP}
FROZEN = {"freeze": 2, "freeze the next": STOP}


@pytest.mark.parametrize(
    "event",
    ["unfreeze", *(pytest.param(event, marks=pytest.mark.release) for event in (*FROZEN, "unfreeze late"))],
)
@pytest.mark.parametrize("name", ["all", "low precision", "fragments"])
def test_resume_after_layers_were_unfrozen_or_frozen(name: str, event: str) -> None:
    """Whether a layer is trained may change after the saved run attached, and after or before the resumed one does."""
    algorithm = {**ALGORITHMS, "fragments": tb.DiLoCoAlgorithm(4, fragments=2, delay=1)}[name]

    def make_sgd(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)]

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01, make_optimizers=make_sgd)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            expected = []
            for step in range(END):
                if step == UNFROZEN.get(event):
                    trainer.module.frozen.requires_grad_(True)
                if step == FROZEN.get(event):
                    trainer.module.first.requires_grad_(False)
                if step == STOP:
                    state, data = copy.deepcopy(attachment.rank_state_dict()), trainer.data.get_state()
                trainer.step()
                expected.append(copy.deepcopy(trainer.module.state_dict()))

        for changes_before_attach, by_hand in ((False, False), (False, True), (True, False)):
            trained = dict.fromkeys(name for name, weight in trainer.module.named_parameters() if weight.requires_grad)
            changed = copy.deepcopy(MODEL)
            if changes_before_attach:
                for key, weight in changed.named_parameters():
                    weight.requires_grad_(key in trained)
            resumed = Trainer(group, changed, lr=0.01, make_optimizers=make_sgd)
            with tb.attach(resumed.ddp, resumed.optimizer, algorithm) as attachment:
                resumed.step()  # loading must discard this step
                for key, weight in resumed.module.named_parameters():
                    weight.requires_grad_(key in trained)
                saved = copy.deepcopy(state)
                if by_hand:
                    with torch.no_grad():
                        for key, weight in resumed.module.state_dict().items():
                            weight.copy_(saved["module"][key])
                    resumed.optimizer.load_state_dict(saved["optimizers"][0])
                    attachment.load_state_dict(saved["attachment"])
                else:
                    attachment.load_rank_state_dict(saved)
                resumed.data.set_state(data)
                for step in range(STOP, END):
                    resumed.step()
                    assert_same_weights([expected[step], resumed.module.state_dict()])
            assert_same_weights([trainer.module.state_dict(), resumed.module.state_dict()])

    run_ranks(2, body)
