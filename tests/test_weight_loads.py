"""Loads of weights after attach, with every weight algorithm."""

import copy
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Normed, Trainer, Weights, assert_same_weights, weights_of
from pairwise import pairwise
from ranks import leave_by_exception, on_each_rank, run_ranks
from torchbagua.testing.simulation.run import Rank, Simulation
from training import build

DiLoCo = tb.DiLoCoAlgorithm
ASYNC = "async in 8 bits"
ALGORITHMS = {
    "diloco": DiLoCo(2, compression=None),
    "diloco in 4 bits": DiLoCo(3),
    "streaming diloco": DiLoCo(6, fragments=2, delay=2),
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one", communication_interval=2),
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    ASYNC: tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, compression="minmax_uint8"),
}
SYNCHRONOUS = [name for name in ALGORITHMS if name != ASYNC]
NOTICE = "weights were loaded after attach"
MODEL = build(Normed)
DISAGREEMENT = "ranks have not loaded the same weights since attach"

pytestmark = pytest.mark.filterwarnings(f"ignore:.*{NOTICE}:UserWarning")
forbids_notice = pytest.mark.filterwarnings(f"error:.*{NOTICE}:UserWarning")


def attach(trainer: Trainer, algorithm: tb.Algorithm | str, **options: Any) -> tb.Attachment:
    """Attach an algorithm, or that of ALGORITHMS with this name."""
    return tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS.get(algorithm, algorithm), **options)


def take_steps(trainer: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        trainer.step()


def new_state(seed: int = 7, module: nn.Module = MODEL) -> dict[str, torch.Tensor]:
    """Return a checkpoint with new values. They are positive, because some are variances."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in module.state_dict().items()
    }


def assert_equals_state(weights: Weights, state: Weights, name: str) -> None:
    """Assert that the weights equal a state: bitwise, unless the algorithm computes with them."""
    # For equal replicas the ring computes x + x/3 + x/3 - 5/3 x, which is zero except for rounding.
    rtol = 1e-6 if name == "low precision" else 0
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, state[key], rtol=rtol, atol=0, msg=f"{name}: {key}")


def freeze_steps(trainer: Trainer) -> None:
    """Make all further steps leave the weights unchanged."""
    trainer.module.eval()
    trainer.optimizer.state.clear()
    for parameters in trainer.optimizer.param_groups:
        parameters["lr"] = 0.0


@pytest.mark.parametrize(
    ("name", "evaluates"),
    [*((name, False) for name in ALGORITHMS), *((name, True) for name in ("streaming diloco", "decentralized", ASYNC))],
)
def test_earlier_rounds_do_not_change_loaded_weights(name: str, evaluates: bool) -> None:
    """After steps with lr 0, weights and buffers equal the load, though a round was in flight and replicas differed.

    An evaluation of the mean completes rounds in flight if they are asynchronous, or if buckets are rebuilt.
    """

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name) as attachment:
            take_steps(trainer, 8 if evaluates else 7)
            trainer.module.load_state_dict(new_state())
            if evaluates:
                trainer.module.frozen.requires_grad_(True)
                with attachment.averaged_weights():
                    assert_equals_state(weights_of(trainer.module), new_state(), name)
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_equals_state(weights, new_state(), name)


@pytest.mark.parametrize(
    ("algorithm", "num_steps"),
    [
        *((ALGORITHMS[name], 0) for name in SYNCHRONOUS),
        (DiLoCo(3, compression=None, outer_optimizer=torch.optim.Adagrad), 6),  # it has state before its first step
        (DiLoCo(3, compression=None, outer_optimizer=torch.optim.Adam), 6),
        (DiLoCo(3), 6),
    ],
    ids=str,
)
def test_a_load_after_attach_trains_as_a_load_before_attach(algorithm: tb.Algorithm, num_steps: int) -> None:
    """Bitwise equal in every step: it resets momentum and residuals of the steps and rounds before it."""

    def body(group: dist.ProcessGroup, *, is_loaded_before: bool) -> list[Weights]:
        model = copy.deepcopy(MODEL)
        if is_loaded_before:
            model.load_state_dict(new_state())
        trainer = Trainer(group, model, lr=0.01)
        with attach(trainer, algorithm):
            if not is_loaded_before:
                take_steps(trainer, num_steps)
                trainer.module.load_state_dict(new_state())
                trainer.optimizer.state.clear()
                trainer.data.manual_seed(1000 + group.rank())
                trainer.trace.updated.clear()
            take_steps(trainer, 9)
        return [*trainer.trace.updated, weights_of(trainer.module)]

    before = run_ranks(2, lambda group: body(group, is_loaded_before=True))
    after = run_ranks(2, lambda group: body(group, is_loaded_before=False))
    for expected, found in zip(before, after, strict=True):
        for pair in zip(expected, found, strict=True):
            assert_same_weights(pair)


def load_with_error(ddp: DistributedDataParallel, state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.module.load_state_dict(state)


PARTIAL_LOADS: dict[str, Callable[[DistributedDataParallel, dict[str, torch.Tensor]], Any]] = {
    "strict=False": lambda ddp, state: ddp.module.load_state_dict(state, strict=False),
    "of the ddp": lambda ddp, state: ddp.load_state_dict(
        {f"module.{key}": tensor for key, tensor in state.items()}, False
    ),
    "of a part": lambda ddp, state: ddp.module.last.load_state_dict(
        {key.removeprefix("last."): tensor for key, tensor in state.items()}
    ),
    "assigned": lambda ddp, state: ddp.module.load_state_dict(copy.deepcopy(state), strict=False, assign=True),
    "with an error": load_with_error,
}


@pytest.mark.parametrize("way", PARTIAL_LOADS)
@on_each_rank(2)
def test_a_partial_load_changes_only_its_parameters(group: dist.ProcessGroup, way: str) -> None:
    """Parameters that are not in the state keep their shadow weights, momentum and round in flight."""
    trainer = Trainer(group, MODEL, lr=0.01)
    state = {key: tensor for key, tensor in new_state().items() if key.startswith("last.")}
    with attach(trainer, DiLoCo(3, compression=None, delay=2)) as attachment:
        take_steps(trainer, 7)  # the round after step 6 is in flight
        impl = attachment.impl
        attachment.state_dict()  # receives the round
        before = copy.deepcopy(impl.shadow.state_dict())
        differences = copy.deepcopy(impl.state_dict()["differences"])
        assert all(differences[key].any() for key in state)
        PARTIAL_LOADS[way](trainer.ddp, state)
        after = attachment.state_dict()["impl"]
        leave_by_exception(attachment)  # the optimizer does not have the parameters that were assigned
    for key, theta in before["theta"].items():
        is_loaded = key in state
        assert torch.equal(after["theta"][key], state[key] if is_loaded else theta), key
        momentum = before["outer"]["state"][key]["momentum_buffer"]
        assert momentum.any()
        assert torch.equal(after["outer"]["state"][key]["momentum_buffer"], momentum * (not is_loaded)), key
        assert torch.equal(after["differences"][key], differences[key] * (not is_loaded)), key


def load_other_values(trainer: Trainer, attachment: tb.Attachment, rank: int) -> None:
    trainer.module.load_state_dict(new_state(rank))


def load_on_one_rank(trainer: Trainer, attachment: tb.Attachment, rank: int) -> None:
    if rank == 1:
        trainer.module.load_state_dict(new_state())


def claim_equal_weights(trainer: Trainer, attachment: tb.Attachment, rank: int) -> None:
    attachment.weights_changed()


OTHER_VALUES = "a digest of the loaded values: rank 0 has "
OTHER_NUMBERS = "the number of loads: rank 0 has 0, rank 1 has 1"


@pytest.mark.parametrize(
    ("name", "change", "message", "timeout_s"),
    [
        ("streaming diloco", load_other_values, OTHER_VALUES, 60),
        ("streaming diloco", claim_equal_weights, OTHER_VALUES, 60),
        ("decentralized", load_on_one_rank, OTHER_NUMBERS, 60),
        ("low precision", load_other_values, OTHER_VALUES, 60),
        (ASYNC, load_other_values, OTHER_VALUES, 60),
        (ASYNC, load_on_one_rank, OTHER_NUMBERS, 1),  # which it waits for
    ],
)
def test_ranks_with_different_loads_all_raise(
    name: str, change: Callable[..., None], message: str, timeout_s: float
) -> None:
    def body(group: dist.ProcessGroup) -> str:
        trainer = Trainer(group, MODEL, lr=0.001)
        with attach(trainer, name, timeout=timedelta(seconds=timeout_s)) as attachment:
            take_steps(trainer, 3)
            change(trainer, attachment, group.rank())
            with pytest.raises(tb.CommunicationError) as caught:
                take_steps(trainer, 1_000_000)
            leave_by_exception(attachment)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert f"{DISAGREEMENT}: ranks disagree on {message}" in first
    assert "call attachment.weights_changed() on all ranks" in first


def test_ranks_that_load_one_after_the_other_do_not_raise_later() -> None:
    """The time in which loads differ ends with the last rank's load: that of the next load does not include it."""

    def body(rank: Rank) -> None:
        module = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=500)
        loaded = {name: torch.ones_like(weight) for name, weight in module.state_dict().items()}
        with tb.attach(module, optimizer, algorithm, process_group=rank.group()):
            for step in range(50):
                rank.compute(0.5)
                if step in (2 + 6 * rank.number, 36 + 6 * rank.number):
                    module.load_state_dict(loaded)
                module(torch.ones(1, 3)).sum().backward()
                optimizer.step()

    outcomes = Simulation(2, seed=0, timeout=timedelta(seconds=10)).run(body)
    assert [outcome.error for outcome in outcomes] == [None, None]


@pytest.mark.parametrize(
    ("name", "broadcasts"),
    [
        *((name, False) for name in ("streaming diloco", "low precision", ASYNC)),
        *((name, True) for name in ("streaming diloco", "decentralized", "low precision", ASYNC)),
    ],
)
def test_all_ranks_continue_from_the_weights_of_one_rank(name: str, broadcasts: bool) -> None:
    """Every rank loads them, which changes nothing on rank 0, but counts there too; or rank 0 loads and broadcasts.

    No hook sees a manual broadcast: `weights_changed` on all ranks turns it into a load on all ranks.
    """
    saved: list[dict[str, torch.Tensor]] = []

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name) as attachment:
            take_steps(trainer, 5)
            if group.rank() == 0:
                if broadcasts:
                    trainer.module.load_state_dict(new_state())
                saved.append(copy.deepcopy(trainer.module.state_dict()))
            dist.barrier(group=group)
            if broadcasts:
                for tensor in trainer.module.parameters():
                    dist.broadcast(tensor.detach(), group_src=0, group=group)
                attachment.weights_changed()
            else:
                trainer.module.load_state_dict(saved[0])
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        is_compared = {key: "running" not in key or not broadcasts for key in weights}  # it leaves buffers as they are
        assert_equals_state({key: weights[key] for key in weights if is_compared[key]}, saved[0], name)


@on_each_rank(2)
def test_a_state_saved_after_a_load_contains_the_load(group: dist.ProcessGroup) -> None:
    """Also if a state was refused since, and if it has the weights of new layers, as PEFT adds them."""
    trainer = Trainer(group, MODEL, lr=0.01)
    with attach(trainer, DiLoCo(2, compression=None)) as attachment:
        take_steps(trainer, 3)
        trainer.module.load_state_dict(new_state())
        other = '{"version": 1, "algorithm": "ByteGradAlgorithm", "arguments": {}}'
        with pytest.raises(ValueError, match="but DiLoCoAlgorithm is attached"):
            attachment.load_state_dict({"algorithm": other, "impl": {}})
        assert_same_weights([attachment.state_dict()["impl"]["theta"], new_state()])
        trainer.module.last = nn.Sequential(trainer.module.last, nn.Linear(1, 1))
        nn.init.zeros_(trainer.module.last[1].weight)
        trainer.optimizer.add_param_group({"params": list(trainer.module.last[1].parameters())})
        take_steps(trainer, 1)
        state = new_state(8, trainer.module)
        trainer.module.load_state_dict(state)
        assert_same_weights([attachment.state_dict()["impl"]["theta"], state])


@forbids_notice
@pytest.mark.parametrize("name", ["streaming diloco", "decentralized", "low precision"])
@on_each_rank(2)
def test_a_state_that_is_loaded_after_the_weights_replaces_them(group: dist.ProcessGroup, name: str) -> None:
    """Each rank then has its own weights, without a notice. Earlier loads have no effect either."""
    first, second = Trainer(group, MODEL, lr=0.01), Trainer(group, MODEL, lr=0.01)
    with attach(first, name) as attachment:
        take_steps(first, 5)
        saved = copy.deepcopy([first.module.state_dict(), first.optimizer.state_dict(), attachment.state_dict()])
        data = first.data.get_state()
        take_steps(first, 6)
    with attach(second, name) as attachment:
        second.module.load_state_dict(new_state(group.rank()))
        second.module.load_state_dict(saved[0])
        second.optimizer.load_state_dict(saved[1])
        attachment.load_state_dict(saved[2])
        second.data.set_state(data)
        take_steps(second, 6)
    assert_same_weights([weights_of(first.module), weights_of(second.module)])


def load_and_load(module: nn.Module, ema: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(ema)
    module.load_state_dict(own)


def load_and_copy(module: nn.Module, ema: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(ema)
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            tensor.copy_(own[key])


def assign_by_hand(module: nn.Module, ema: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    for values in (ema, own):
        for key, parameter in module.named_parameters():
            parameter.data = values[key].clone()


@forbids_notice
@pairwise(
    name=["streaming diloco", "low precision"],
    swap=[load_and_load, load_and_copy, assign_by_hand],
    swapping_ranks=["all", "rank 0 alone"],
)
def test_a_model_swapped_in_for_an_evaluation_leaves_no_trace(
    name: str, swap: Callable[..., None], swapping_ranks: str
) -> None:
    """Swapping other weights in and out between two steps changes nothing, whatever is in flight."""

    def body(group: dist.ProcessGroup, *, swaps: bool) -> list[Weights]:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name):
            for _ in range(7):
                trainer.step()
                if swaps and (swapping_ranks == "all" or group.rank() == 0):
                    swap(trainer.module, new_state(group.rank()), copy.deepcopy(trainer.module.state_dict()))
        return [*trainer.trace.updated, weights_of(trainer.module)]

    without = run_ranks(2, lambda group: body(group, swaps=False))
    found = run_ranks(2, lambda group: body(group, swaps=True))
    for pair in zip(without, found, strict=True):
        for weights in zip(*pair, strict=True):
            assert_same_weights(weights)


@forbids_notice
@pytest.mark.parametrize(("name", "assign"), [("streaming diloco", True), (ASYNC, False)])
@on_each_rank(2)
def test_averaged_weights_averages_swapped_in_models(group: dist.ProcessGroup, name: str, assign: bool) -> None:
    """As the evaluation of an EMA. A load within the block is refused, since the end of the block would undo it."""
    trainer = Trainer(group, MODEL, lr=0.01)
    mean = (new_state(0)["last.weight"] + new_state(1)["last.weight"]) / 2
    with attach(trainer, name) as attachment:
        for _ in range(4):
            trainer.step()
            own = trainer.module.state_dict(keep_vars=True)
            if not assign:
                own = copy.deepcopy(own)
            trainer.module.load_state_dict(new_state(group.rank()), assign=assign)
            with attachment.averaged_weights():
                with pytest.raises(RuntimeError, match=r"loaded within averaged_weights, .* Load before the block"):
                    trainer.module.load_state_dict(new_state())
                assert torch.equal(trainer.module.last.weight, mean)
            trainer.module.load_state_dict(own, assign=assign)


def clamp(weight: torch.Tensor, rank: int) -> None:
    weight.data.clamp_(-0.1 * rank, 0.1)


def shift(weight: torch.Tensor, rank: int) -> None:
    weight.data = weight.data + 0.25 * rank


@forbids_notice
@pytest.mark.parametrize("edit", [clamp, shift])
def test_other_edits_count_as_local_progress(edit: Callable[[torch.Tensor, int], None]) -> None:
    """A WGAN's clamp, SAM's assignment to `data`: local SGD averages the edited weights."""
    model = build(lambda: nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> list[Weights]:
        trainer, seen = Trainer(group, model, lr=0.0), []
        with attach(trainer, tb.LocalSGDAlgorithm(2, compression=None)):
            for _ in range(2):
                trainer.step()
                for weight in trainer.module.parameters():
                    edit(weight, group.rank())
                seen.append(weights_of(trainer.module))
                trainer.step()
                seen.append(weights_of(trainer.module))
        return seen

    first, second = run_ranks(2, body)
    for edited in (0, 2):
        for name, weight in first[edited].items():
            # theta - (theta - mean) is the mean, except for rounding
            torch.testing.assert_close(first[edited + 1][name], (weight + second[edited][name]) / 2)
        assert_same_weights([first[edited + 1], second[edited + 1]])


def test_one_rank_warns_once() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2)):
            trainer.module.load_state_dict(new_state())
            trainer.module.load_state_dict(new_state(8))
            take_steps(trainer, 3)

    with pytest.warns(UserWarning, match=f"8 {NOTICE}: .* they become the shadow weights") as warned:
        run_ranks(2, body)
    assert [str(warning.message) for warning in warned if NOTICE in str(warning.message)] == [str(warned[0].message)]


def test_loads_into_copies_and_pickles_are_not_seen() -> None:
    """Loads into the module after detach are not seen either."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2, compression=None)) as attachment:
            take_steps(trainer, 3)
            copies = [copy.deepcopy(trainer.module), pickle.loads(pickle.dumps(trainer.module))]
            before = attachment.state_dict()["impl"]["theta"]
            for copied in copies:
                copied.load_state_dict(new_state())
                assert torch.equal(copied.last.weight, new_state()["last.weight"])
            assert_same_weights([before, attachment.state_dict()["impl"]["theta"]])
            assert b"torchbagua" not in pickle.dumps(trainer.module).replace(b"_torchbagua_attached", b"")
            with attachment.averaged_weights():
                copies[0].load_state_dict(new_state())
        for module in trainer.module.modules():
            assert not module._load_state_dict_pre_hooks
            assert not module._load_state_dict_post_hooks

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, body)
