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
from ranks import leave_by_exception, run_ranks
from torchbagua.testing.simulation.run import Rank, Simulation
from training import build

DiLoCo = tb.DiLoCoAlgorithm
ALGORITHMS = {
    "diloco": DiLoCo(2, compression=None),
    "diloco in 4 bits": DiLoCo(3),
    "streaming diloco": DiLoCo(6, fragments=2, delay=2),
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one", communication_interval=2),
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "async in 8 bits": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, compression="minmax_uint8"),
}
SYNCHRONOUS = [name for name in ALGORITHMS if "async" not in name]
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


def with_rank(trainer: Trainer, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    return {name: tensor + group.rank() for name, tensor in trainer.module.state_dict().items()}


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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_earlier_rounds_do_not_change_loaded_weights(name: str) -> None:
    """After steps with lr 0, weights and buffers equal the load, though a round was in flight and replicas differed."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name):
            take_steps(trainer, 7)
            trainer.module.load_state_dict(new_state())
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_equals_state(weights, new_state(), name)


@pytest.mark.parametrize(
    ("name", "unfreezes"), [("streaming diloco", True), ("decentralized", True), ("async in 8 bits", True)]
)
def test_earlier_rounds_do_not_change_loaded_weights_if_the_mean_is_evaluated_before_the_next_step(
    name: str, unfreezes: bool
) -> None:
    """The evaluation completes rounds in flight if they are asynchronous, or if buckets are rebuilt."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name) as attachment:
            take_steps(trainer, 8)
            trainer.module.load_state_dict(new_state())
            trainer.module.frozen.requires_grad_(unfreezes)
            with attachment.averaged_weights():
                assert_equals_state(weights_of(trainer.module), new_state(), name)
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_equals_state(weights, new_state(), name)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_load_after_attach_trains_as_a_load_before_attach(name: str) -> None:
    """Bitwise equal in every step."""

    def body(group: dist.ProcessGroup, *, is_loaded_before: bool) -> list[Weights]:
        model = copy.deepcopy(MODEL)
        if is_loaded_before:
            model.load_state_dict(new_state())
        trainer = Trainer(group, model, lr=0.01)
        with attach(trainer, name):
            if not is_loaded_before:
                trainer.module.load_state_dict(new_state())
            take_steps(trainer, 9)
        return [*trainer.trace.updated, weights_of(trainer.module)]

    before = run_ranks(2, lambda group: body(group, is_loaded_before=True))
    after = run_ranks(2, lambda group: body(group, is_loaded_before=False))
    for expected, found in zip(before, after, strict=True):
        for pair in zip(expected, found, strict=True):
            assert_same_weights(pair)


@pytest.mark.parametrize(("compression", "outer_optimizer"), [(None, torch.optim.Adagrad), ("minmax_uint4", None)])
def test_a_load_resets_momentum_and_residuals(compression: str | None, outer_optimizer: Any) -> None:
    """A load after a round acts like a new attachment. Adagrad has state before its first step."""
    algorithm = DiLoCo(3, compression=compression, outer_optimizer=outer_optimizer)

    def body(group: dist.ProcessGroup, num_steps: int) -> list[Weights]:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, algorithm):
            take_steps(trainer, num_steps)
            trainer.module.load_state_dict(new_state())
            trainer.optimizer.state.clear()
            trainer.data.manual_seed(group.rank())
            trainer.trace.updated.clear()
            take_steps(trainer, 9)
        return [*trainer.trace.updated, weights_of(trainer.module)]

    for new, old in zip(*(run_ranks(2, lambda group, n=n: body(group, n)) for n in (0, 6)), strict=True):
        for pair in zip(new, old, strict=True):
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
def test_a_partial_load_changes_only_its_parameters(way: str) -> None:
    """Parameters that are not in the state keep their shadow weights, momentum and round in flight."""

    def body(group: dist.ProcessGroup) -> None:
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
            expected = torch.zeros_like(momentum) if is_loaded else momentum
            assert momentum.any()
            assert torch.equal(after["outer"]["state"][key]["momentum_buffer"], expected), key
            expected = torch.zeros_like(differences[key]) if is_loaded else differences[key]
            assert torch.equal(after["differences"][key], expected), key

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("name", "loading_ranks"),
    [
        ("streaming diloco", "all, other values"),
        ("streaming diloco", "one rank alone"),
        ("decentralized", "one rank alone"),
        ("low precision", "all, other values"),
        ("async in 8 bits", "all, other values"),
    ],
)
def test_ranks_that_load_different_weights_all_raise(name: str, loading_ranks: str) -> None:
    def body(group: dist.ProcessGroup) -> str:
        trainer = Trainer(group, MODEL, lr=0.01)
        try:
            with attach(trainer, name):
                take_steps(trainer, 3)
                if loading_ranks != "one rank alone" or group.rank() == 1:
                    trainer.module.load_state_dict(new_state(group.rank()))
                take_steps(trainer, 6)
        except tb.CommunicationError as error:
            return str(error)
        return "nothing was raised"

    first, second = run_ranks(2, body)
    assert first == second
    different_values = "ranks disagree on a digest of the loaded values: rank 0 has "
    different_numbers = "ranks disagree on the number of loads: rank 0 has 0, rank 1 has 1"
    found = different_values if loading_ranks == "all, other values" else different_numbers
    assert f"{DISAGREEMENT}: {found}" in first
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


def test_ranks_that_continue_without_the_load_raise_after_the_timeout() -> None:
    def body(group: dist.ProcessGroup) -> int:
        trainer = Trainer(group, MODEL, lr=0.001)
        with attach(trainer, "async in 8 bits", timeout=timedelta(seconds=1)) as attachment:
            take_steps(trainer, 3)
            if group.rank() == 1:
                trainer.module.load_state_dict(new_state())
            with pytest.raises(
                tb.CommunicationError, match=f"{DISAGREEMENT}: .* number of loads: rank 0 has 0, rank 1 has 1"
            ):
                take_steps(trainer, 1_000_000)
            leave_by_exception(attachment)
        return 1

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize("name", ["streaming diloco", "low precision", "async in 8 bits"])
def test_all_ranks_load_the_weights_of_one_rank(name: str) -> None:
    """The load changes nothing on that rank, but counts there as on the other ranks."""
    saved: list[dict[str, torch.Tensor]] = []

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name):
            take_steps(trainer, 3)
            if group.rank() == 0:
                saved.append(copy.deepcopy(trainer.module.state_dict()))
            dist.barrier(group=group)
            trainer.module.load_state_dict(saved[0])
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_equals_state(weights, saved[0], name)


@pytest.mark.parametrize("name", ["streaming diloco", "decentralized", "low precision", "async in 8 bits"])
def test_one_rank_loads_and_broadcasts(name: str) -> None:
    """No hook sees a manual broadcast: `weights_changed` on all ranks turns it into a load on all ranks."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name) as attachment:
            take_steps(trainer, 5)
            if group.rank() == 0:
                trainer.module.load_state_dict(new_state())
            for tensor in trainer.module.parameters():
                dist.broadcast(tensor.detach(), group_src=0, group=group)
            attachment.weights_changed()
            freeze_steps(trainer)
            take_steps(trainer, 8)
        return {key: tensor.detach().clone() for key, tensor in trainer.module.named_parameters()}

    for weights in run_ranks(2, body):
        assert_equals_state({key: weights[key] for key in weights if not key.startswith("frozen.")}, new_state(), name)


def test_weights_changed_raises_if_ranks_have_different_weights() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2)) as attachment:
            take_steps(trainer, 3)  # one step after the round
            attachment.weights_changed()
            with pytest.raises(tb.CommunicationError, match=DISAGREEMENT):
                trainer.step()
            leave_by_exception(attachment)

    run_ranks(2, body)


def test_a_state_saved_after_a_load_contains_the_load() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2, compression=None)) as attachment:
            take_steps(trainer, 3)
            trainer.module.load_state_dict(new_state())
            theta = attachment.state_dict()["impl"]["theta"]
            assert_same_weights([theta, new_state()])

    run_ranks(2, body)


@forbids_notice
@pytest.mark.parametrize("name", ["streaming diloco", "decentralized", "low precision"])
def test_a_state_that_is_loaded_after_the_weights_replaces_them(name: str) -> None:
    """Each rank then has its own weights, without a notice. Earlier loads have no effect either."""

    def body(group: dist.ProcessGroup) -> None:
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

    run_ranks(2, body)


def test_a_refused_state_changes_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2)) as attachment:
            trainer.module.load_state_dict(new_state())
            other = '{"version": 1, "algorithm": "ByteGradAlgorithm", "arguments": {}}'
            with pytest.raises(ValueError, match="but DiLoCoAlgorithm is attached"):
                attachment.load_state_dict({"algorithm": other, "impl": {}})
            assert_same_weights([attachment.state_dict()["impl"]["theta"], new_state()])

    run_ranks(2, body)


def ema_by_load(trainer: Trainer, ema: dict[str, torch.Tensor]) -> None:
    own = copy.deepcopy(trainer.module.state_dict())
    trainer.module.load_state_dict(ema)
    trainer.module.load_state_dict(own)


def ema_by_load_and_copy(trainer: Trainer, ema: dict[str, torch.Tensor]) -> None:
    own = copy.deepcopy(trainer.module.state_dict())
    trainer.module.load_state_dict(ema)
    with torch.no_grad():
        for key, tensor in trainer.module.state_dict().items():
            tensor.copy_(own[key])


def ema_by_hand(trainer: Trainer, ema: dict[str, torch.Tensor]) -> None:
    own = copy.deepcopy(trainer.module.state_dict())
    for values in (ema, own):
        for key, parameter in trainer.module.named_parameters():
            parameter.data = values[key].clone()


@forbids_notice
@pairwise(
    name=["streaming diloco", "low precision"],
    swap=[ema_by_load, ema_by_load_and_copy, ema_by_hand],
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
                    swap(trainer, new_state(group.rank()))
        return [*trainer.trace.updated, weights_of(trainer.module)]

    without = run_ranks(2, lambda group: body(group, swaps=False))
    found = run_ranks(2, lambda group: body(group, swaps=True))
    for pair in zip(without, found, strict=True):
        for weights in zip(*pair, strict=True):
            assert_same_weights(weights)


@forbids_notice
@pytest.mark.parametrize(("name", "assign"), [("streaming diloco", True), ("async in 8 bits", False)])
def test_averaged_weights_averages_swapped_in_models(name: str, assign: bool) -> None:
    """The evaluation of an EMA of weights that differ between ranks does this."""

    def body(group: dist.ProcessGroup) -> None:
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
                    assert torch.equal(trainer.module.last.weight, mean)
                trainer.module.load_state_dict(own, assign=assign)

    run_ranks(2, body)


def clamp(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def shift(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.data = parameter.data + 0.25


class OneLayer(nn.Module):
    """A linear layer without state that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@forbids_notice
@pytest.mark.parametrize("edit", [clamp, shift])
def test_other_edits_count_as_local_progress(edit: Callable[[Trainer], None]) -> None:
    """A WGAN's clamp, SAM's assignment to `data`: local SGD averages the edited weights."""
    model = build(OneLayer)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.1)
        twins = [Trainer(group, model, lr=0.1) for _ in range(2)]
        for rank, twin in enumerate(twins):
            twin.ddp = twin.module
            twin.data.manual_seed(1000 + rank)
        with attach(trainer, tb.LocalSGDAlgorithm(2, compression=None)):
            for step in range(6):
                for edited in (trainer, *twins):
                    edited.step()
                    if step % 2:
                        continue
                    edit(edited)
                if step % 2:
                    with torch.no_grad():
                        for pair in zip(*(twin.module.parameters() for twin in twins), strict=True):
                            mean = (pair[0] + pair[1]) / 2
                            for parameter in pair:
                                parameter.copy_(mean)
                # theta - (theta - mean) is the mean, except for rounding
                torch.testing.assert_close(weights_of(trainer.module), weights_of(twins[group.rank()].module))

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["streaming diloco", "async in 8 bits"])
def test_a_load_within_averaged_weights_is_refused(name: str) -> None:
    """The end of the block would undo the load."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, name) as attachment:
            take_steps(trainer, 2)
            with attachment.averaged_weights():
                mean = weights_of(trainer.module)
                with pytest.raises(RuntimeError, match=r"loaded within averaged_weights, .* Load before the block"):
                    trainer.module.load_state_dict(new_state())
                assert_same_weights([mean, weights_of(trainer.module)])
            take_steps(trainer, 2)

    run_ranks(2, body)


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


def test_a_load_into_a_new_layer_is_seen() -> None:
    """PEFT replaces layers like this."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attach(trainer, DiLoCo(2, compression=None)) as attachment:
            trainer.module.last = nn.Sequential(trainer.module.last, nn.Linear(1, 1))
            nn.init.zeros_(trainer.module.last[1].weight)
            trainer.optimizer.add_param_group({"params": list(trainer.module.last[1].parameters())})
            take_steps(trainer, 1)
            state = new_state(module=trainer.module)
            trainer.module.load_state_dict(state)
            assert_same_weights([attachment.state_dict()["impl"]["theta"], state])

    run_ranks(2, body)
