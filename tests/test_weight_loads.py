"""Weights that are loaded after attach, under every algorithm that averages weights."""

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
from ranks import run_ranks
from training import build

DiLoCo = tb.DiLoCoAlgorithm
SYNCHRONOUS = {
    "diloco": DiLoCo(2, compression=None),
    "diloco in 4 bits": DiLoCo(3),
    "streaming diloco": DiLoCo(6, fragments=2, delay=2),
    "local sgd": tb.LocalSGDAlgorithm(2),
    "decentralized": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one", communication_interval=2),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
}
ASYNC = {
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1),
    "async in 8 bits": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, compression="minmax_uint8"),
}
EVERY = pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNC])
SOME = pytest.mark.parametrize("name", ["streaming diloco", "decentralized", "low precision", "async in 8 bits"])
EVERY_SYNCHRONOUS = pytest.mark.parametrize("name", SYNCHRONOUS)
NOTICE = "weights were loaded after attach"
MODEL = build(Normed)
APART = "ranks have not loaded the same weights since attach"

pytestmark = pytest.mark.filterwarnings(f"ignore:.*{NOTICE}:UserWarning")
silent = pytest.mark.filterwarnings(f"error:.*{NOTICE}:UserWarning")


def algorithm_of(name: str) -> tb.Algorithm:
    return {**SYNCHRONOUS, **ASYNC}[name]


def attached(trainer: Trainer, algorithm: tb.Algorithm, **options: Any) -> tb.Attachment:
    return tb.attach(trainer.ddp, trainer.optimizer, algorithm, **options)


def steps(trainer: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        trainer.step()


def new_state(seed: int = 7, module: nn.Module = MODEL) -> dict[str, torch.Tensor]:
    """A checkpoint of other values, positive, as variances are."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in module.state_dict().items()
    }


def with_rank(trainer: Trainer, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    return {name: tensor + group.rank() for name, tensor in trainer.module.state_dict().items()}


def assert_holds(weights: Weights, state: Weights, name: str) -> None:
    """The weights of an algorithm are those of a state, bit for bit where it does not compute."""
    # Of equal replicas the ring forms x + x/3 + x/3 - 5/3 x, which is zero but for its rounding.
    rtol = 1e-6 if name == "low precision" else 0
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, state[key], rtol=rtol, atol=0, msg=f"{name}: {key}")


def freeze_steps(trainer: Trainer) -> None:
    """Have steps change nothing from now on."""
    trainer.module.eval()
    trainer.optimizer.state.clear()
    for parameters in trainer.optimizer.param_groups:
        parameters["lr"] = 0.0


@pytest.mark.parametrize("name", ["diloco", "diloco in 4 bits", "streaming diloco", "local sgd", "low precision"])
def test_loaded_weights_stay(name: str) -> None:
    """What was measured: they ended at 0.58 to 1.23."""

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, algorithm_of(name)):
            for index in range(24):
                if index == 7:
                    half = {key: torch.full_like(one, 0.5) for key, one in ddp.module.state_dict().items()}
                    ddp.module.load_state_dict(half)
                    optimizer.param_groups[0]["lr"] = 1e-6
                optimizer.zero_grad()
                ddp(torch.randn(4, 8, generator=data)).square().mean().backward()
                optimizer.step()
        return ddp.module.weight.min().item(), ddp.module.weight.max().item()

    model = build(lambda: nn.Linear(8, 40))
    for least, most in run_ranks(2, body):
        assert 0.4999 < least <= most < 0.5001


@EVERY
def test_nothing_of_earlier_rounds_changes_loaded_weights(name: str) -> None:
    """After steps of lr 0 they are what was loaded, buffers too. In 7 steps rounds are in flight and replicas apart."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm_of(name)):
            steps(trainer, 7)
            trainer.module.load_state_dict(new_state())
            freeze_steps(trainer)
            steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_holds(weights, new_state(), name)


@pytest.mark.parametrize("name", ["streaming diloco", "decentralized", "async"])
@pytest.mark.parametrize("unfreezes", [False, True])
def test_nor_where_the_mean_is_evaluated_before_the_next_step(name: str, unfreezes: bool) -> None:
    """Which finishes what is in flight where rounds are asynchronous, or buckets are made anew."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm_of(name)) as attachment:
            steps(trainer, 8)
            trainer.module.load_state_dict(new_state())
            trainer.module.frozen.requires_grad_(unfreezes)
            with attachment.averaged_weights():
                assert_holds(weights_of(trainer.module), new_state(), name)
            freeze_steps(trainer)
            steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_holds(weights, new_state(), name)


@EVERY_SYNCHRONOUS
def test_training_is_what_it_is_when_loaded_before_attach(name: str) -> None:
    """Bit for bit, in every step."""

    def body(group: dist.ProcessGroup, *, is_loaded_before: bool) -> list[Weights]:
        model = copy.deepcopy(MODEL)
        if is_loaded_before:
            model.load_state_dict(new_state())
        trainer = Trainer(group, model, lr=0.01)
        with attached(trainer, SYNCHRONOUS[name]):
            if not is_loaded_before:
                trainer.module.load_state_dict(new_state())
            steps(trainer, 9)
        return [*trainer.trace.updated, weights_of(trainer.module)]

    before = run_ranks(4, lambda group: body(group, is_loaded_before=True))
    after = run_ranks(4, lambda group: body(group, is_loaded_before=False))
    for expected, found in zip(before, after, strict=True):
        for pair in zip(expected, found, strict=True):
            assert_same_weights(pair)


@pytest.mark.parametrize("compression", [None, "minmax_uint4"])
@pytest.mark.parametrize("outer_optimizer", [None, torch.optim.Adagrad], ids=str)
def test_momentum_and_residuals_start_anew(compression: str | None, outer_optimizer: Any) -> None:
    """After the last round of a run, a load is as a new attachment; Adagrad has a state before its first step."""
    algorithm = DiLoCo(3, compression=compression, outer_optimizer=outer_optimizer)

    def body(group: dist.ProcessGroup, num_steps: int) -> list[Weights]:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm):
            steps(trainer, num_steps)
            trainer.module.load_state_dict(new_state())
            trainer.optimizer.state.clear()
            trainer.data.manual_seed(group.rank())
            trainer.trace.updated.clear()
            steps(trainer, 9)
        return [*trainer.trace.updated, weights_of(trainer.module)]

    for new, old in zip(*(run_ranks(2, lambda group, n=n: body(group, n)) for n in (0, 6)), strict=True):
        for pair in zip(new, old, strict=True):
            assert_same_weights(pair)


def load_with_error(ddp: DistributedDataParallel, state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.module.load_state_dict(state)


WAYS: dict[str, Callable[[DistributedDataParallel, dict[str, torch.Tensor]], Any]] = {
    "strict=False": lambda ddp, state: ddp.module.load_state_dict(state, strict=False),
    "of the ddp": lambda ddp, state: ddp.load_state_dict({f"module.{key}": one for key, one in state.items()}, False),
    "of a part": lambda ddp, state: ddp.module.last.load_state_dict(
        {key.removeprefix("last."): one for key, one in state.items()}
    ),
    "assigned": lambda ddp, state: ddp.module.load_state_dict(copy.deepcopy(state), strict=False, assign=True),
    "with an error": load_with_error,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_loaded(way: str) -> None:
    """What is not in the state keeps its shadow weights, momentum, and the round in flight."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        state = {key: one for key, one in new_state().items() if key.startswith("last.")}
        with attached(trainer, DiLoCo(3, compression=None, delay=2)) as attachment:
            steps(trainer, 7)  # the round after step 6 is in flight
            impl = attachment.impl
            attachment.state_dict()  # receives it
            before = copy.deepcopy(impl.shadow.state_dict())
            differences = copy.deepcopy(impl.state_dict()["differences"])
            assert all(differences[key].any() for key in state)
            WAYS[way](trainer.ddp, state)
            after = attachment.state_dict()["impl"]
            attachment._end(failed=True)  # an optimizer has no assigned ones
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


@pytest.mark.parametrize("name", ["diloco", "streaming diloco", "decentralized", "low precision", "async in 8 bits"])
@pytest.mark.parametrize("who", ["all, other values", "one rank alone"])
def test_ranks_that_load_different_weights_all_raise(name: str, who: str) -> None:
    def body(group: dist.ProcessGroup) -> str:
        trainer = Trainer(group, MODEL, lr=0.01)
        try:
            with attached(trainer, algorithm_of(name)):
                steps(trainer, 3)
                if who != "one rank alone" or group.rank() == 1:
                    trainer.module.load_state_dict(new_state(group.rank()))
                steps(trainer, 6)
        except tb.CommunicationError as error:
            return str(error)
        return "nothing was raised"

    first, second = run_ranks(2, body)
    assert first == second
    of_all = "ranks 0 and 1 have loaded different values"
    found = of_all if who == "all, other values" else "rank 0 has seen 0 loads, rank 1 1 load"
    assert f"{APART}: {found}" in first
    assert "call attachment.weights_changed() on all ranks" in first


def test_ranks_that_go_on_without_a_load_raise_after_the_timeout() -> None:
    def body(group: dist.ProcessGroup) -> int:
        trainer = Trainer(group, MODEL, lr=0.001)
        with attached(trainer, ASYNC["async in 8 bits"], timeout=timedelta(seconds=2)) as attachment:
            steps(trainer, 3)
            if group.rank() == 1:
                trainer.module.load_state_dict(new_state())
            with pytest.raises(tb.CommunicationError, match=f"{APART}: rank 0 has seen 0 loads, rank 1 1 load"):
                steps(trainer, 1_000_000)
            attachment._end(failed=True)
        return 1

    assert run_ranks(2, body) == [1, 1]


@SOME
def test_all_load_what_one_rank_holds(name: str) -> None:
    """For that rank the load changes nothing. It counts all the same, as it does for the others."""
    saved: list[dict[str, torch.Tensor]] = []

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm_of(name)):
            steps(trainer, 3)
            if group.rank() == 0:
                saved.append(copy.deepcopy(trainer.module.state_dict()))
            dist.barrier(group=group)
            trainer.module.load_state_dict(saved[0])
            freeze_steps(trainer)
            steps(trainer, 8)
        return weights_of(trainer.module)

    for weights in run_ranks(2, body):
        assert_holds(weights, saved[0], name)


@SOME
def test_one_rank_loads_and_broadcasts(name: str) -> None:
    """By hand, which no hook sees: `weights_changed` on all ranks makes it a load of all."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm_of(name)) as attachment:
            steps(trainer, 5)
            if group.rank() == 0:
                trainer.module.load_state_dict(new_state())
            for tensor in trainer.module.parameters():
                dist.broadcast(tensor.detach(), group_src=0, group=group)
            attachment.weights_changed()
            freeze_steps(trainer)
            steps(trainer, 8)
        return {key: tensor.detach().clone() for key, tensor in trainer.module.named_parameters()}

    for weights in run_ranks(2, body):
        assert_holds({key: weights[key] for key in weights if not key.startswith("frozen.")}, new_state(), name)


def test_weights_changed_with_unseen_values_apart() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2)) as attachment:
            steps(trainer, 3)  # one after the round
            attachment.weights_changed()
            with pytest.raises(tb.CommunicationError, match=APART):
                trainer.step()
            attachment._end(failed=True)

    run_ranks(2, body)


def test_weights_changed_where_nothing_is_kept() -> None:
    def body(group: dist.ProcessGroup, algorithm: str) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm) as attachment:
            steps(trainer, 1)
            before = weights_of(trainer.module)
            attachment.weights_changed()
            assert_same_weights([before, weights_of(trainer.module)])
        attachment.weights_changed()

    run_ranks(2, lambda group: body(group, "bytegrad"))
    run_ranks(1, lambda group: body(group, "diloco"))


def test_a_state_saved_after_a_load_has_it() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2, compression=None)) as attachment:
            steps(trainer, 3)
            trainer.module.load_state_dict(new_state())
            theta = attachment.state_dict()["impl"]["theta"]
            assert_same_weights([theta, new_state()])

    run_ranks(2, body)


@silent
@pytest.mark.parametrize("name", ["diloco in 4 bits", "streaming diloco", "decentralized", "low precision"])
def test_a_state_that_is_loaded_after_the_weights_decides(name: str) -> None:
    """Each rank has its own weights then, and no word is said. Loads from before it are no matter, either."""

    def body(group: dist.ProcessGroup) -> None:
        first, second = Trainer(group, MODEL, lr=0.01), Trainer(group, MODEL, lr=0.01)
        with attached(first, SYNCHRONOUS[name]) as attachment:
            steps(first, 5)
            saved = copy.deepcopy([first.module.state_dict(), first.optimizer.state_dict(), attachment.state_dict()])
            data = first.data.get_state()
            steps(first, 6)
        with attached(second, SYNCHRONOUS[name]) as attachment:
            second.module.load_state_dict(new_state(group.rank()))
            second.module.load_state_dict(saved[0])
            second.optimizer.load_state_dict(saved[1])
            attachment.load_state_dict(saved[2])
            second.data.set_state(data)
            steps(second, 6)
        assert_same_weights([weights_of(first.module), weights_of(second.module)])

    run_ranks(2, body)


def test_a_state_that_is_refused_decides_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2)) as attachment:
            trainer.module.load_state_dict(new_state())
            other = '{"version": 1, "algorithm": "ByteGradAlgorithm", "arguments": {}}'
            with pytest.raises(ValueError, match="attached is DiLoCoAlgorithm"):
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


@silent
@pairwise(
    name=["diloco in 4 bits", "streaming diloco", "decentralized", "low precision"],
    swap=[ema_by_load, ema_by_load_and_copy, ema_by_hand],
    who=["all", "rank 0 alone"],
)
def test_another_model_for_an_evaluation(name: str, swap: Callable[..., None], who: str) -> None:
    """Swapped in and out again between two steps, it leaves no trace, whatever is in flight."""

    def body(group: dist.ProcessGroup, *, swaps: bool) -> list[Weights]:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, SYNCHRONOUS[name]):
            for _ in range(7):
                trainer.step()
                if swaps and (who == "all" or group.rank() == 0):
                    swap(trainer, new_state(group.rank()))
        return [*trainer.trace.updated, weights_of(trainer.module)]

    without = run_ranks(2, lambda group: body(group, swaps=False))
    found = run_ranks(2, lambda group: body(group, swaps=True))
    for pair in zip(without, found, strict=True):
        for weights in zip(*pair, strict=True):
            assert_same_weights(weights)


@silent
@pytest.mark.parametrize("name", ["streaming diloco", "async"])
@pytest.mark.parametrize("assign", [False, True])
def test_the_mean_of_models_that_are_swapped_in(name: str, assign: bool) -> None:
    """As an EMA of weights that differ between ranks is evaluated."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        mean = (new_state(0)["last.weight"] + new_state(1)["last.weight"]) / 2
        with attached(trainer, algorithm_of(name)) as attachment:
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


@torch.no_grad()
def limit_norm(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.mul_(0.5 / parameter.norm().clamp(min=0.5))


def shift(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.data = parameter.data + 0.25


class OneLayer(nn.Module):
    """A linear layer, and nothing that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@silent
@pytest.mark.parametrize("edit", [clamp, limit_norm, shift])
def test_other_edits_are_progress_of_a_rank(edit: Callable[[Trainer], None]) -> None:
    """A WGAN's clamp, a max-norm, what SAM does through `data`: local SGD takes the mean of what they leave."""
    model = build(OneLayer)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.1)
        twins = [Trainer(group, model, lr=0.1) for _ in range(2)]
        for rank, twin in enumerate(twins):
            twin.ddp = twin.module
            twin.data.manual_seed(1000 + rank)
        with attached(trainer, tb.LocalSGDAlgorithm(2, compression=None)):
            for step in range(6):
                for one in (trainer, *twins):
                    one.step()
                    if step % 2:
                        continue
                    edit(one)
                if step % 2:
                    with torch.no_grad():
                        for same in zip(*(twin.module.parameters() for twin in twins), strict=True):
                            mean = (same[0] + same[1]) / 2
                            for parameter in same:
                                parameter.copy_(mean)
                # theta - (theta - mean) is the mean, but for rounding
                torch.testing.assert_close(weights_of(trainer.module), weights_of(twins[group.rank()].module))

    run_ranks(2, body)


@SOME
def test_a_load_within_averaged_weights_is_refused(name: str) -> None:
    """Its end would undo it."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, algorithm_of(name)) as attachment:
            steps(trainer, 2)
            with attachment.averaged_weights():
                mean = weights_of(trainer.module)
                with pytest.raises(RuntimeError, match=r"loaded within averaged_weights, .* Load before the block"):
                    trainer.module.load_state_dict(new_state())
                assert_same_weights([mean, weights_of(trainer.module)])
            steps(trainer, 2)

    run_ranks(2, body)


def test_it_is_said_once_and_by_one_rank() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2)):
            trainer.module.load_state_dict(new_state())
            trainer.module.load_state_dict(new_state(8))
            steps(trainer, 3)

    with pytest.warns(UserWarning, match=f"8 {NOTICE}: .* they become the shadow weights") as told:
        run_ranks(2, body)
    assert [str(one.message) for one in told if NOTICE in str(one.message)] == [str(told[0].message)]


def test_copies_and_pickles_are_not_heard_of() -> None:
    """Nor is the module after detach."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2, compression=None)) as attachment:
            steps(trainer, 3)
            others = [copy.deepcopy(trainer.module), pickle.loads(pickle.dumps(trainer.module))]
            before = attachment.state_dict()["impl"]["theta"]
            for other in others:
                other.load_state_dict(new_state())
                assert torch.equal(other.last.weight, new_state()["last.weight"])
            assert_same_weights([before, attachment.state_dict()["impl"]["theta"]])
            assert b"torchbagua" not in pickle.dumps(trainer.module).replace(b"_torchbagua_attached", b"")
            with attachment.averaged_weights():
                others[0].load_state_dict(new_state())
        for module in trainer.module.modules():
            assert not module._load_state_dict_pre_hooks
            assert not module._load_state_dict_post_hooks

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, body)


def test_a_layer_that_is_new_is_heard_of() -> None:
    """As one that PEFT puts in the place of another."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, MODEL, lr=0.01)
        with attached(trainer, DiLoCo(2, compression=None)) as attachment:
            trainer.module.last = nn.Sequential(trainer.module.last, nn.Linear(1, 1))
            nn.init.zeros_(trainer.module.last[1].weight)
            trainer.optimizer.add_param_group({"params": list(trainer.module.last[1].parameters())})
            steps(trainer, 1)
            state = new_state(module=trainer.module)
            trainer.module.load_state_dict(state)
            assert_same_weights([attachment.state_dict()["impl"]["theta"], state])

    run_ranks(2, body)
