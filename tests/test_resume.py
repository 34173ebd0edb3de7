"""Checkpoint and resume of weight algorithms: bitwise equal to uninterrupted training."""

import copy
import dataclasses
import io
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
from averaging import Normed, Trainer, assert_same_weights, weights_of
from ranks import run_ranks
from training import build

ALGORITHMS = {
    "all": tb.DecentralizedAlgorithm(),
    "all, every 3": tb.DecentralizedAlgorithm(communication_interval=3),
    "shift_one": tb.DecentralizedAlgorithm(True, "shift_one"),
    "shift_one, every 3": tb.DecentralizedAlgorithm(True, "shift_one", 3),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "low precision, every 3": tb.LowPrecisionDecentralizedAlgorithm(communication_interval=3),
}
STOP, END = 4, 9


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


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("nodes", [None, [0, 0, 1, 1]], ids=["flat", "nodes"])
def test_resume_bit_for_bit(name: str, nodes: list[int] | None) -> None:
    """Also with other buckets, since states are keyed by weight name; for exceptions see test_saved_states.py."""
    model, algorithm = build(Normed), ALGORITHMS[name]
    has_shards = nodes is not None and isinstance(algorithm, tb.LowPrecisionDecentralizedAlgorithm)
    resumed = algorithm if has_shards else dataclasses.replace(algorithm, bucket_cap_mb=0.01)

    def body(group: dist.ProcessGroup) -> None:
        def attach(trainer: Trainer, algorithm: tb.Algorithm = algorithm) -> tb.Attachment:
            bagua_group = tb.BaguaProcessGroup(group, nodes=nodes)
            return tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=bagua_group)

        uninterrupted = Trainer(group, model, lr=0.01)
        with attach(uninterrupted):
            for _ in range(END):
                uninterrupted.step()
        uninterrupted.trace.final = weights_of(uninterrupted.module)

        first = Trainer(group, model, lr=0.01)
        with attach(first) as attachment:
            for _ in range(STOP):
                first.step()
            file = io.BytesIO()
            torch.save(checkpoint(first, attachment), file)
            first.step()  # saving must not change training
            assert_same_weights([weights_of(first.module), uninterrupted.trace.start[STOP + 1]])

        file.seek(0)
        second = Trainer(group, model, lr=0.01)
        with attach(second, resumed) as attachment:
            second.step()  # loading must discard this step
            resume(second, attachment, torch.load(file, weights_only=True))
            for step in range(STOP, END):
                assert_same_weights([weights_of(second.module), uninterrupted.trace.start[step]])
                second.step()
        assert_same_weights([weights_of(second.module), uninterrupted.trace.final])

    run_ranks(4, body)


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


def test_async_resumes_its_steps_and_its_state() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=3)
        first = Trainer(group, model, lr=0.001)
        states = []
        with tb.attach(first.ddp, first.optimizer, algorithm) as attachment:
            for step in range(6):
                first.step()
                if step in (1, 4):
                    states.append(copy.deepcopy(checkpoint(first, attachment)))
            attachment.impl.abort(first.ddp)
            states.append(copy.deepcopy(checkpoint(first, attachment)))

        for state, expected in zip(states, ("warm-up", "running", "stopped"), strict=True):
            second = Trainer(group, model, lr=0.001)
            with tb.attach(second.ddp, second.optimizer, algorithm) as attachment:
                resume(second, attachment, state)
                assert attachment.impl.mode == expected
                assert attachment.impl.step == state["attachment"]["impl"]["step"]
                second.step()
                second.step()
                if expected == "stopped":
                    attachment.impl.resume(second.ddp)
                assert attachment.impl.mode == "running"

    run_ranks(2, body)


def test_rounds_before_loading_do_not_change_the_weights_that_async_loads() -> None:
    """Rounds run from attach on; the weights of a rank that loads later must still equal the checkpoint."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, final_average=False)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            state = checkpoint(trainer, attachment)
            state["attachment"]["impl"].update(has_differences=False)
            state["model"] = {key: torch.full_like(value, 10) for key, value in state["model"].items()}
            time.sleep(0.2 * group.rank())
            resume(trainer, attachment, state)
            for value in weights_of(trainer.module).values():
                assert torch.equal(value, torch.full_like(value, 10))

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["all", "low precision"])
def test_state_of_another_model_or_algorithm(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name]) as attachment:
            state = attachment.state_dict()
            with pytest.raises(ValueError, match=r"state must have the keys \[.*'step'.*\], got \['step'\]"):
                attachment.load_state_dict({**state, "impl": {"step": 3}})
            key = "differences" if name == "all" else "left"
            other_impl = {**state["impl"], key: {"other.weight": torch.zeros(3)}}
            with pytest.raises(
                ValueError, match=r"must hold the weights of this module, 8 tensors, got 1; they differ"
            ):
                attachment.load_state_dict({**state, "impl": other_impl})
            described = '{"version": 1, "algorithm": "ByteGradAlgorithm", "arguments": {}}'
            with pytest.raises(ValueError, match="the state was saved by ByteGradAlgorithm"):
                attachment.load_state_dict({**state, "algorithm": described})
            trainer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS.values(), tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)])
def test_state_of_another_rank_or_of_fewer_ranks(algorithm: tb.Algorithm) -> None:
    """With the replicas of another rank, the weights would drift in every round."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            rank, state = group.rank(), attachment.state_dict()
            for place in ({"rank": 1 - rank}, {"num_ranks": 4}):
                got = "got a state from rank {rank} of {num_ranks}".format(**{"rank": rank, "num_ranks": 2} | place)
                with pytest.raises(ValueError, match=f"state must be from rank {rank} of 2, {got}; every rank"):
                    attachment.load_state_dict({**state, "impl": {**state["impl"], **place}})
            attachment.load_state_dict(state)

    run_ranks(2, body)


def freeze(module: Normed, step: int, event: str) -> None:
    """Change which layers are trained, before this step."""
    if event == "unfreeze" and step == 2:
        module.frozen.requires_grad_(True)
    if event == "unfreeze late" and step == STOP:  # after the last step before the checkpoint
        module.frozen.requires_grad_(True)
    if event == "freeze" and step == 2:
        module.first.requires_grad_(False)
    if event == "freeze the next" and step == STOP:
        module.first.requires_grad_(False)
        module.frozen.requires_grad_(True)


@pytest.mark.parametrize(
    "event",
    [
        "unfreeze",
        pytest.param("unfreeze late", marks=pytest.mark.release),
        pytest.param("freeze", marks=pytest.mark.release),
        pytest.param("freeze the next", marks=pytest.mark.release),
    ],
)
@pytest.mark.parametrize(
    "algorithm",
    [
        tb.DecentralizedAlgorithm(),
        tb.LowPrecisionDecentralizedAlgorithm(),
        tb.DiLoCoAlgorithm(2),
        tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    ],
    ids=["all", "low precision", "diloco", "fragments"],
)
def test_resume_after_layers_were_unfrozen_or_frozen(algorithm: tb.Algorithm, event: str) -> None:
    """Whether a layer is trained may change after the saved run attached, and after or before the resumed one does."""
    model = build(Normed)

    def make_sgd(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)]

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01, make_optimizers=make_sgd)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            expected = []
            for step in range(END):
                freeze(trainer.module, step, event)
                if step == STOP:
                    state, data = copy.deepcopy(attachment.rank_state_dict()), trainer.data.get_state()
                trainer.step()
                expected.append(copy.deepcopy(trainer.module.state_dict()))

        for changes_before_attach, by_hand in ((False, False), (False, True), (True, False)):
            trained = dict.fromkeys(name for name, weight in trainer.module.named_parameters() if weight.requires_grad)
            changed = copy.deepcopy(model)
            if changes_before_attach:
                for name, weight in changed.named_parameters():
                    weight.requires_grad_(name in trained)
            resumed = Trainer(group, changed, lr=0.01, make_optimizers=make_sgd)
            with tb.attach(resumed.ddp, resumed.optimizer, algorithm) as attachment:
                resumed.step()  # loading must discard this step
                for name, weight in resumed.module.named_parameters():
                    weight.requires_grad_(name in trained)
                saved = copy.deepcopy(state)
                if by_hand:
                    with torch.no_grad():
                        for name, weight in resumed.module.state_dict().items():
                            weight.copy_(saved["module"][name])
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


def test_async_loads_the_state_of_a_layer_that_was_unfrozen() -> None:
    model = build(Normed)
    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)

    def body(group: dist.ProcessGroup) -> None:
        first, second = Trainer(group, model), Trainer(group, model)
        with tb.attach(first.ddp, first.optimizer, algorithm) as attachment:
            first.module.frozen.requires_grad_(True)
            first.step()
            attachment.impl.abort(first.ddp)  # ranks may save in different rounds otherwise
            state = copy.deepcopy(attachment.rank_state_dict())
        with tb.attach(second.ddp, second.optimizer, algorithm) as attachment:
            attachment.load_rank_state_dict(state)
            assert_same_weights([state["module"], second.module.state_dict()])
            assert "frozen.weight" in attachment.state_dict()["impl"]["differences"]
            second.step()
        first, second = weights_of(first.module), weights_of(second.module)

    run_ranks(2, body)
