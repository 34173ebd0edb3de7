"""States that were saved by another release or with other arguments: training continues, or loading raises.

`python tests/saved_states.py LABEL` wrote the files of tests/data, with the code of release LABEL.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchbagua as tb
from ranks import run_ranks
from saved_states import END, FOLDER, MAKE_ALGORITHM, STOP, Trainer, saved_file
from torchbagua.codecs import Sign1Bit

SAVED = [(label, name) for label, name in (path.stem.split("-")[1:] for path in sorted(FOLDER.glob("state-*.pt")))]
"""The label and the name of each file."""
assert {name for _, name in SAVED} == MAKE_ALGORITHM.keys()

LESS_THAN_A_TENSOR_MB = 1e-6
# Arguments on which a state does not depend, with values that differ from the saved ones.
HARMLESS: dict[str, list[dict[str, Any]]] = {
    "bytegrad": [{"hierarchical": False, "block": 64}],
    "all": [{"bucket_cap_mb": LESS_THAN_A_TENSOR_MB, "hierarchical": False, "final_average": False}],
    "low_precision": [{"bucket_cap_mb": LESS_THAN_A_TENSOR_MB, "hierarchical": False, "final_average": False}],
    "diloco": [{"bucket_cap_mb": LESS_THAN_A_TENSOR_MB, "hierarchical": False, "final_average": False}],
    "qadam": [{"hierarchical": False, "compression": Sign1Bit(64)}],
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
        if name != "async"
        for arguments in [{}, *HARMLESS.get(name, [])]
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


@pytest.mark.parametrize(
    ("label", "name"), [saved for saved in SAVED if saved[1] in ("fragments", "powersgd", "qadam")]
)
def test_an_earlier_release_s_distributed_checkpoint_continues(tmp_path: Path, label: str, name: str) -> None:
    """It is loaded into the keys of a current state, and must contain all of them."""
    states = {rank: state["attachment"] for rank, state in load_saved(label, name).items()}
    dcp.save(states, checkpoint_id=tmp_path, no_dist=True)

    def use(trainer: Trainer, attachment: tb.Attachment, state: dict[str, Any]) -> None:
        rank = f"rank{trainer.rank}"
        loaded = {rank: attachment.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        continue_training(trainer, attachment, state | {"attachment": loaded[rank]})

    run_ranks(2, resume_with(label, name, use))


AVERAGING = [tb.DecentralizedAlgorithm(), tb.AsyncModelAverageAlgorithm()]
WITHOUT_BUFFERS = [dataclasses.replace(algorithm, average_buffers=False) for algorithm in AVERAGING]
ONE_BIT = {"compression": "sign1bit", "error_feedback": True}
EIGHT_BITS = {"compression": "minmax_uint8", "error_feedback": True}
LOW = tb.LowPrecisionDecentralizedAlgorithm
DILOCO = tb.DiLoCoAlgorithm
FEEDBACK = partial(tb.ByteGradAlgorithm, error_feedback=True)
NODES = [0, 0, 1, 1]

Described = tb.Algorithm | dict[str, Any]
"""An algorithm, or QAdamAlgorithm's arguments."""


def load_into_another(
    before: Described, after: Described, nodes: tuple[list[int] | None, list[int] | None] = (None, None), steps: int = 0
) -> None:
    """Save after `steps` with one algorithm and nodes, load with another algorithm and nodes, and take a step."""
    size = 2 if nodes == (None, None) else 4

    def body(group: dist.ProcessGroup) -> None:
        def attach(described: Described, nodes: list[int] | None) -> tuple[Trainer, tb.Attachment]:
            trainer = Trainer(group, "all" if isinstance(described, tb.Algorithm) else "qadam")
            algorithm = described
            if not isinstance(algorithm, tb.Algorithm):
                algorithm = tb.QAdamAlgorithm(trainer.optimizer, **algorithm)
            bagua_group = tb.BaguaProcessGroup(group, nodes=nodes)
            return trainer, tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=bagua_group)

        trainer, attachment = attach(before, nodes[0])
        with attachment:
            for number in range(steps):
                trainer.step(number)
            state = trainer.save(attachment)
        trainer, attachment = attach(after, nodes[1])
        with attachment:
            trainer.load(attachment, state)
            trainer.step(steps)

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        *[(*pair, "average_buffers=True, .* has average_buffers=False; attach with") for pair in zip(
            AVERAGING, WITHOUT_BUFFERS, strict=True
        )],
        (EIGHT_BITS, {}, "error_feedback=True, .* has error_feedback=False; attach with"),
        ({}, EIGHT_BITS, "error_feedback=False, .* has error_feedback=True; attach with"),
        (DILOCO(), DILOCO(outer_lr=0.5), "outer_lr=0.7, .* has outer_lr=0.5; attach with"),
        (ONE_BIT, EIGHT_BITS, "compression='sign1bit', .* has compression='minmax_uint8'; attach with"),
        (tb.ByteGradAlgorithm(), tb.GradientAllReduceAlgorithm(), "saved by ByteGradAlgorithm, but GradientAll"),
    ],
)  # fmt: skip
def test_arguments_on_which_a_state_depends_must_not_differ(before: Described, after: Described, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_into_another(before, after)


@pytest.mark.parametrize(
    ("before", "after", "nodes", "message"),
    [
        (LOW(), LOW(bucket_cap_mb=1), (NODES, NODES), "bucket_cap_mb=8.0, .* has bucket_cap_mb=1;"),
        (LOW(), LOW(hierarchical=False), (NODES, NODES), "hierarchical=True, .* has hierarchical=False;"),
        (LOW(), LOW(), (NODES, [0, 1, 0, 1]), r"nodes=\[0, 0, 1, 1\], .* has nodes=\[0, 1, 0, 1\];"),
    ],
)
def test_replicas_of_nodes_depend_on_the_nodes(
    before: Described, after: Described, nodes: tuple[list[int], list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_into_another(before, after, nodes)


@pytest.mark.parametrize(
    ("before", "after", "nodes"),
    [
        (LOW(hierarchical=False), LOW(hierarchical=False, bucket_cap_mb=1), (NODES, [0, 1, 0, 1])),
        (tb.DecentralizedAlgorithm(), tb.DecentralizedAlgorithm(True, "shift_one", 2), (None, None)),
        (FEEDBACK(), FEEDBACK(False, False, block=64), (NODES, [0, 1, 0, 1])),
        (DILOCO(3, delay=2), DILOCO(5, compression="minmax_uint8", bucket_cap_mb=1), (None, None)),
        ({"hierarchical": False, **ONE_BIT}, {**ONE_BIT, "compression": Sign1Bit(64)}, (NODES, NODES)),
    ],
)
def test_arguments_on_which_a_state_does_not_depend_may_differ(
    before: Described, after: Described, nodes: tuple[list[int] | None, list[int] | None]
) -> None:
    load_into_another(before, after, nodes, steps=4)


@pytest.mark.parametrize(
    ("steps", "num_warm", "is_refused"), [(2, 5, True), (4, 0, False), (4, 4, False), (4, 5, True)]
)
def test_a_warm_up_that_is_over_does_not_begin_again(steps: int, num_warm: int, is_refused: bool) -> None:
    def algorithm(warmup_steps: int) -> tb.Algorithm:
        return tb.AsyncModelAverageAlgorithm(sync_interval_ms=5, warmup_steps=warmup_steps)

    if is_refused and steps == 4:
        message = "past a warm-up of warmup_steps=4, .* has warmup_steps=5; attach with at most 4"
        with pytest.raises(ValueError, match=message):
            load_into_another(algorithm(4), algorithm(num_warm), steps=steps)
    else:
        load_into_another(algorithm(4), algorithm(num_warm), steps=steps)


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
        message = (
            r"must be of format version 1 or earlier, which torchbagua [\d.]+ reads, got 2; load it with the release"
        )
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

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.ones(1)}

    def load_state_dict(self, state: Any) -> None:
        assert state["count"] == 1
        self.num_loads += 1


def test_a_user_s_algorithm_loads_states_with_equal_arguments() -> None:
    def body(group: dist.ProcessGroup) -> None:
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

    run_ranks(1, body)
