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
