"""States that were saved by another release or with other arguments: training continues, or loading raises.

`python tests/saved_states.py LABEL` wrote the files of tests/data, with the code of release LABEL.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import on_each_rank, run_ranks
from saved_states import END, FOLDER, MAKE_ALGORITHM, STOP, Trainer, saved_file
from torchbagua.codecs import Sign1Bit

SAVED = [(label, name) for label, name in (path.stem.split("-")[1:] for path in sorted(FOLDER.glob("state-*.pt")))]
"""The label and the name of each file."""
assert {name for _, name in SAVED} == MAKE_ALGORITHM.keys()

LESS_THAN_A_TENSOR_MB = 1e-6
ANY_BUCKETS = {"bucket_cap_mb": LESS_THAN_A_TENSOR_MB, "hierarchical": False, "final_average": False}
# Arguments on which a state does not depend, with values that differ from the saved ones.
HARMLESS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("all", "low_precision", "diloco"), ANY_BUCKETS),
    "bytegrad": {"hierarchical": False, "block": 64},
    "qadam": {"hierarchical": False, "compression": Sign1Bit(64)},
}
assert HARMLESS.keys() <= MAKE_ALGORITHM.keys()


def load_saved(label: str, name: str) -> dict[str, Any]:
    """Return the saved states of both ranks, by rank."""
    state: dict[str, Any] = torch.load(saved_file(label, name), weights_only=True)
    return state


def resume_with(
    label: str, name: str, use: Callable[[Trainer, tb.Attachment, dict[str, Any]], None], **arguments: Any
) -> Callable[[dist.ProcessGroup], None]:
    """Return the function of a rank: attach with `arguments`, and call `use` with the saved state of the rank."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, name)
        algorithm = dataclasses.replace(trainer.algorithm, **arguments)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            use(trainer, attachment, load_saved(label, name)[f"rank{group.rank()}"])

    return body


def continue_training(trainer: Trainer, attachment: tb.Attachment, state: dict[str, Any]) -> None:
    """Load, train to the end, and compare with the weights of the uninterrupted run."""
    # A distributed checkpoint must contain all keys of a current state.
    assert attachment.state_dict()["impl"].keys() <= state["attachment"]["impl"].keys()
    trainer.load(attachment, state)
    for number in range(STOP, END):
        trainer.step(number)
    for name, weight in trainer.weights().items():
        expected = state["weights_at_end"][name]
        if isinstance(trainer.algorithm, tb.PowerSGDAlgorithm):
            torch.testing.assert_close(weight, expected)  # another machine may sum a matrix product in another order
        else:
            assert torch.equal(weight, expected), name


@pytest.mark.parametrize(
    ("label", "name", "arguments"),
    [
        (label, name, arguments)
        for label, name in SAVED
        for arguments in ({}, HARMLESS.get(name))
        if name != "async" and arguments is not None
    ],
)
def test_an_earlier_release_s_state_continues(label: str, name: str, arguments: dict[str, Any]) -> None:
    run_ranks(2, resume_with(label, name, continue_training, **arguments))


@pytest.mark.parametrize("label", [label for label, name in SAVED if name == "async"])
@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": LESS_THAN_A_TENSOR_MB, "warmup_steps": 1}])
def test_an_earlier_release_s_asynchronous_state_is_loaded(label: str, arguments: dict[str, Any]) -> None:
    """The mean that had arrived when the state was saved is added to the weights."""

    def use(trainer: Trainer, attachment: tb.Attachment, state: dict[str, Any]) -> None:
        attachment.impl.abort(trainer.ddp, final_average=False)
        trainer.load(attachment, state | {"attachment": stop(state["attachment"])})
        for name in ("weight", "bias"):
            difference = state["attachment"]["impl"]["differences"][name]
            assert difference.any()
            assert torch.equal(trainer.weights()[name], state["model"][name] + difference)

    def stop(attachment: dict[str, Any]) -> dict[str, Any]:
        return attachment | {"impl": attachment["impl"] | {"is_enabled": False}}  # no new round interferes

    run_ranks(2, resume_with(label, "async", use, **arguments, final_average=False))


ONE_BIT = {"compression": "sign1bit", "error_feedback": True}
EIGHT_BITS = {"compression": "minmax_uint8", "error_feedback": True}
LOW, DILOCO, ASYNC = tb.LowPrecisionDecentralizedAlgorithm, tb.DiLoCoAlgorithm, tb.AsyncModelAverageAlgorithm
FEEDBACK = partial(tb.ByteGradAlgorithm, error_feedback=True)
NODES, OTHER_NODES = [0, 0, 1, 1], [0, 1, 0, 1]
WARM = partial(ASYNC, sync_interval_ms=5)

Described = tb.Algorithm | dict[str, Any]
"""An algorithm, or QAdamAlgorithm's arguments."""


@pytest.mark.parametrize(
    ("before", "after", "nodes", "steps", "message"),
    [
        # The state depends on these.
        (tb.DecentralizedAlgorithm(), tb.DecentralizedAlgorithm(average_buffers=False), None, 0,
         "average_buffers=True, .* has average_buffers=False; attach with"),
        (ASYNC(), ASYNC(average_buffers=False), None, 0, "average_buffers=True, .* has average_buffers=False; attach"),
        (EIGHT_BITS, {}, None, 0, "error_feedback=True, .* has error_feedback=False; attach with"),
        ({}, EIGHT_BITS, None, 0, "error_feedback=False, .* has error_feedback=True; attach with"),
        (DILOCO(), DILOCO(outer_lr=0.5), None, 0, "outer_lr=0.7, .* has outer_lr=0.5; attach with"),
        (ONE_BIT, EIGHT_BITS, None, 0, "compression='sign1bit', .* has compression='minmax_uint8'; attach with"),
        (tb.ByteGradAlgorithm(), tb.GradientAllReduceAlgorithm(), None, 0, "saved by ByteGradAlgorithm, but GradientA"),
        # Replicas of nodes depend on the nodes and the buckets.
        (LOW(), LOW(bucket_cap_mb=1), (NODES, NODES), 0, "bucket_cap_mb=8.0, .* has bucket_cap_mb=1;"),
        (LOW(), LOW(hierarchical=False), (NODES, NODES), 0, "hierarchical=True, .* has hierarchical=False;"),
        (LOW(), LOW(), (NODES, OTHER_NODES), 0, r"nodes=\[0, 0, 1, 1\], .* has nodes=\[0, 1, 0, 1\];"),
        # It does not depend on these.
        (LOW(hierarchical=False), LOW(hierarchical=False, bucket_cap_mb=1), (NODES, OTHER_NODES), 4, None),
        (tb.DecentralizedAlgorithm(), tb.DecentralizedAlgorithm(True, "shift_one", 2), None, 4, None),
        (FEEDBACK(), FEEDBACK(False, False, block=64), (NODES, OTHER_NODES), 4, None),
        (DILOCO(3, delay=2), DILOCO(5, compression="minmax_uint8", bucket_cap_mb=1), None, 4, None),
        ({"hierarchical": False, **ONE_BIT}, {**ONE_BIT, "compression": Sign1Bit(64)}, (NODES, NODES), 4, None),
        # A warm-up that is over does not begin again.
        (WARM(warmup_steps=4), WARM(warmup_steps=5), None, 2, None),
        (WARM(warmup_steps=4), WARM(), None, 4, None),
        (WARM(warmup_steps=4), WARM(warmup_steps=4), None, 4, None),
        (WARM(warmup_steps=4), WARM(warmup_steps=5), None, 4,
         "past a warm-up of warmup_steps=4, .* has warmup_steps=5; attach with at most 4"),
    ],
)  # fmt: skip
def test_a_state_that_was_saved_with_other_arguments(
    before: Described, after: Described, nodes: tuple[list[int], list[int]] | None, steps: int, message: str | None
) -> None:
    """Save after `steps` with one algorithm and nodes, load with another algorithm and nodes, and take a step."""

    def body(group: dist.ProcessGroup) -> None:
        def attach(described: Described, nodes: list[int] | None) -> tuple[Trainer, tb.Attachment]:
            is_algorithm = isinstance(described, tb.Algorithm)
            trainer = Trainer(group, "all" if is_algorithm else "qadam")
            algorithm = described if is_algorithm else tb.QAdamAlgorithm(trainer.optimizer, **described)
            bagua_group = tb.BaguaProcessGroup(group, nodes=nodes)
            return trainer, tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=bagua_group)

        trainer, attachment = attach(before, nodes and nodes[0])
        with attachment:
            for number in range(steps):
                trainer.step(number)
            state = trainer.save(attachment)
        trainer, attachment = attach(after, nodes and nodes[1])
        with attachment:
            trainer.load(attachment, state)
            trainer.step(steps)

    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        run_ranks(2 if nodes is None else 4, body)


def test_a_later_release_s_state() -> None:
    """Added keys are ignored; a later format version is refused, and the error names the fix."""

    def use(trainer: Trainer, attachment: tb.Attachment, state: dict[str, Any]) -> None:
        own = attachment.state_dict()
        described = json.loads(own["algorithm"])
        arguments = described["arguments"] | {"added": 5}
        added = own | {
            "algorithm": json.dumps(described | {"arguments": arguments, "added": 5}),
            "impl": own["impl"] | {"added": 5},
            "added": 5,
        }
        attachment.load_state_dict(added)
        later = own | {"algorithm": json.dumps({"version": described["version"] + 1, "what else": "there is"})}
        message = r"of format version 1 or earlier, which torchbagua [\d.]+ reads, got 2; load it with the release"
        with pytest.raises(ValueError, match=message):
            attachment.load_state_dict(later)

    run_ranks(2, resume_with("0.1.0", "all", use))


@dataclasses.dataclass(frozen=True)
class Counting(tb.Algorithm):
    """A user's algorithm that does not declare the arguments on which its state depends."""

    start: int = 0
    names: tuple[str, ...] = ("one",)

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return CountingImpl(runner)


class CountingImpl(tb.AlgorithmImpl):
    num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.ones(1)}

    def load_state_dict(self, state: Any) -> None:
        assert state["count"] == 1
        self.num_loads += 1


@on_each_rank(1)
def test_a_user_s_algorithm_loads_states_with_equal_arguments(group: dist.ProcessGroup) -> None:
    trainer = Trainer(group, "all")
    algorithm = Counting(3, ("one", "two"))
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
        state = attachment.state_dict()
        attachment.load_state_dict(state)
        assert attachment.impl.num_loads == 1
        with pytest.raises(ValueError, match=r"with JSON under the key algorithm, got .Counting\(start=3"):
            attachment.load_state_dict(state | {"algorithm": repr(algorithm)})
    for different in (Counting(4, ("one", "two")), Counting(3)):
        with (
            tb.attach(trainer.ddp, trainer.optimizer, different) as attachment,
            pytest.raises(ValueError, match=r"Counting: the state was saved with (start=3|names=)"),
        ):
            attachment.load_state_dict(state)
    # A field that a later release adds.
    wider = dataclasses.make_dataclass("Counting", [("added", int, 5)], bases=(Counting,), frozen=True)
    with tb.attach(trainer.ddp, trainer.optimizer, wider(3, ("one", "two"))) as attachment:
        attachment.load_state_dict(state)
