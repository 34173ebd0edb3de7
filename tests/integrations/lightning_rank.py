"""One rank of runs with Lightning, started by torchrun: `lightning_rank.py <folder> <scenario>...`.

The result of each scenario, or the traceback of its failure, is written to <folder>/<scenario>-rank<rank>.json.
Scenarios run one after another in the same processes, which import Lightning only once (this takes seconds). A
scenario that ends the group must be the only one.
"""

import contextlib
import hashlib
import json
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchbagua as tb
from torchbagua.integrations.lightning import BaguaStrategy

FOLDER = Path(sys.argv[1])
STEPS_AN_EPOCH, BATCH = 10, 16
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"error_feedback": True},
    "qadam": {"error_feedback": True, "compression": "sign1bit"},
    "decentralized": {"communication_interval": 2},
    "low_precision_decentralized": {},
    "diloco": {"inner_steps": 3, "delay": 1},
    # Rounds start at random steps; within this interval none starts.
    "async": {"sync_interval_ms": 600_000, "warmup_steps": 7},
}
AVERAGES_WEIGHTS = ("decentralized", "low_precision_decentralized", "diloco", "async")


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 33), torch.nn.BatchNorm1d(33), torch.nn.Tanh(), torch.nn.Linear(33, 1)]
    return torch.nn.Sequential(*layers)


def data() -> TensorDataset:
    x = torch.randn(2 * STEPS_AN_EPOCH * BATCH, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1].sin() / 2)


def optimizer_for(algorithm: str, parameters: Any) -> torch.optim.Optimizer:
    if algorithm == "qadam":
        return tb.QAdamOptimizer(parameters, lr=0.01, warmup_steps=4)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9 if algorithm == "decentralized" else 0)


class Net(lightning.LightningModule):
    def __init__(self, algorithm: str = "") -> None:
        super().__init__()
        self.net, self.algorithm = build(), algorithm

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("digest", float(int(digest(self)[:6], 16)))

    def configure_optimizers(self) -> Any:
        return optimizer_for(self.algorithm, self.parameters())


def digest(module: Any) -> str:
    """Return a digest of weights, and of buffers if they are averaged; else DDP sends rank 0's before each forward."""
    hasher = hashlib.sha256()
    averages_buffers = getattr(module, "algorithm", "") in AVERAGES_WEIGHTS
    for tensor in module.state_dict().values() if averages_buffers else module.parameters():
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


class Watch(lightning.Callback):
    """Records this rank's own weights after the last batch, before the strategy ends the algorithm."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.own = digest(pl_module)
        self.ddp_hook = trainer.strategy.model._get_ddp_logging_data().get("comm_hook")


class Validations(lightning.Callback):
    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {"before": [], "during": [], "after": []}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen["before"].append(digest(pl_module))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["during"].append(digest(pl_module))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if len(self.seen["after"]) < len(self.seen["during"]):
            self.seen["after"].append(digest(pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["after"].append(digest(pl_module))


SETTINGS = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
SETTINGS |= dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"), False)
SETTINGS |= {"use_distributed_sampler": False}  # the loader has a sampler


def trainer_of(strategy: Any, *, package: Any = lightning, **options: Any) -> Any:
    """Return a trainer with a strategy, or with the strategy of an algorithm and its arguments."""
    if strategy in ALGORITHMS:
        strategy = BaguaStrategy(strategy, **ALGORITHMS[strategy])
    return package.Trainer(strategy=strategy, **{**SETTINGS, **options})


def loader() -> DataLoader[Any]:
    sampler = DistributedSampler(data(), dist.get_world_size(), dist.get_rank(), shuffle=False)
    return DataLoader(data(), batch_size=BATCH, sampler=sampler)


def threads() -> list[str]:
    """Return the names of the threads, except for the main thread and the thread of Lightning's progress bar."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return [name for name in names if name != "tqdm_monitor"]


def each_algorithm(scenario: Callable[[str], Any]) -> dict[str, Any]:
    return {algorithm: scenario(algorithm) for algorithm in ALGORITHMS}


def counts() -> Any:
    def count(algorithm: str, accumulation: int) -> Any:
        recorder, watch, model = tb.observe.Recorder(), Watch(), Net(algorithm)
        strategy = BaguaStrategy(algorithm, **ALGORITHMS[algorithm], observers=[recorder])
        trainer = trainer_of(strategy, max_epochs=1, accumulate_grad_batches=accumulation, callbacks=[watch])
        trainer.fit(model, loader())
        phases = [event.phase for event in recorder.events]
        return {
            **{"steps": trainer.global_step, "step events": phases.count("step"), "buckets": phases.count("bucket")},
            **{"sent": recorder.bytes_sent, "own": watch.own, "end": digest(model), "threads": threads()},
            "is detached": strategy.attachment is None and strategy.model is model,
        }

    return each_algorithm(lambda algorithm: [count(algorithm, 1), count(algorithm, 2)])


def as_in_a_plain_loop() -> Any:
    def compare(algorithm: str) -> Any:
        model = Net(algorithm)
        trainer_of(algorithm).fit(model, loader())

        ddp = DistributedDataParallel(build(), gradient_as_bucket_view=True)
        optimizer = optimizer_for(algorithm, ddp.parameters())
        own = ALGORITHMS[algorithm]
        named = tb.QAdamAlgorithm(optimizer, **own) if algorithm == "qadam" else tb.Algorithm.init(algorithm, **own)
        with tb.attach(ddp, optimizer, named):
            for _ in range(2):
                for x, y in loader():
                    optimizer.zero_grad()
                    (ddp(x) - y).square().mean().backward()
                    optimizer.step()
        ddp.module.algorithm = model.net.algorithm = algorithm
        return {"lightning": digest(model.net), "plain": digest(ddp.module)}

    return each_algorithm(compare)


def pytorch_lightning_by_name() -> Any:
    class Regression(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        training_step, loss = Net.training_step, Net.loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run(strategy: Any) -> str:
        model = Regression()
        trainer = trainer_of(strategy, package=pytorch_lightning)
        trainer.fit(model, loader())
        assert isinstance(trainer.strategy, pytorch_lightning.strategies.DDPStrategy)
        return digest(model)

    return {"ddp": run("ddp"), "bagua": run("bagua")}


def validation() -> Any:
    def run(algorithm: str, *, is_validated: bool, averaged_weights: bool = True) -> Any:
        watch, validations = Watch(), Validations()
        model = Net(algorithm)
        trainer = trainer_of(
            BaguaStrategy(algorithm, **ALGORITHMS[algorithm], averaged_weights=averaged_weights),
            callbacks=[watch, validations],
            val_check_interval=5,
            num_sanity_val_steps=1,
        )
        trainer.fit(model, loader(), *([loader()] if is_validated else []))
        return {**validations.seen, "own": watch.own, "end": digest(model)}

    return each_algorithm(
        lambda algorithm: {
            "averaged": run(algorithm, is_validated=True),
            "own": run(algorithm, is_validated=True, averaged_weights=False),
            "not validated": run(algorithm, is_validated=False),
        }
    )


def async_rounds() -> Any:
    """Run asynchronous averaging with the shortest interval, interrupted by validation and checkpoints."""

    class Rounds(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.num_rounds = trainer.strategy.attachment.impl.num_rounds

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)

    rounds, validations = Rounds(), Validations()
    checkpoint = ModelCheckpoint(FOLDER / "rounds", save_on_train_epoch_end=False)
    model = Net("async")
    trainer = trainer_of(
        BaguaStrategy("async", sync_interval_ms=1),
        callbacks=[validations, checkpoint, rounds],
        val_check_interval=5,
        enable_checkpointing=True,
    )
    trainer.fit(model, loader(), loader())
    return {**validations.seen, "num_rounds": rounds.num_rounds, "end": digest(model), "threads": threads()}


def resume() -> Any:
    """Compare two epochs and a third epoch from the checkpoint with three uninterrupted epochs."""

    def run(algorithm: str, *, in_validation: bool) -> Any:
        folder = FOLDER / f"{algorithm}-{in_validation}"

        def fit(path: Path | None = None) -> Any:
            watch, model = Watch(), Net(algorithm)
            checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not in_validation)
            trainer = trainer_of(algorithm, callbacks=[watch, checkpoint], enable_checkpointing=True, max_epochs=3)
            trainer.fit(model, loader(), loader(), ckpt_path=path)
            return {"own": watch.own, "end": digest(model), "steps": trainer.global_step}

        straight = fit()
        path = folder / "epoch=1.ckpt"
        saved = torch.load(path, weights_only=True)
        states = saved["torchbagua"]
        modules = [state.get("module", saved["state_dict"]) for state in states]
        mean = {name: torch.stack([state[name].double() for state in modules]).mean(0) for name in saved["state_dict"]}
        return {
            "straight": straight,
            "resumed": fit(path),
            "num_states": len(states),
            "are_different": any(not torch.equal(modules[0][name], modules[1][name]) for name in mean),
            "is_mean": all(
                torch.allclose(mean[name], value.double(), rtol=1e-6, atol=1e-7)
                for name, value in saved["state_dict"].items()
                if value.is_floating_point()
            ),
        }

    results = each_algorithm(lambda algorithm: run(algorithm, in_validation=False))
    results |= {f"{name}, in validation": run(name, in_validation=True) for name in ("bytegrad", *AVERAGES_WEIGHTS)}
    return results


def finetuning() -> Any:
    """Resume after BackboneFinetuning has unfrozen a layer. Lightning itself would leave the layer frozen."""

    class Backbone(Net):
        def __init__(self, algorithm: str) -> None:
            super().__init__(algorithm)
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.01)

    class Unfreeze(lightning.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # after the strategy has attached
            pl_module.backbone.requires_grad_(trainer.ckpt_path is not None)

    def run(algorithm: str) -> Any:
        folder = FOLDER / f"finetuning-{algorithm}"

        def fit(path: Path | None = None) -> Any:
            watch, model = Watch(), Backbone(algorithm)
            saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
            tuner = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
            callbacks = [Unfreeze(), watch, tuner, saver]
            trainer = trainer_of(algorithm, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
            trainer.fit(model, loader(), ckpt_path=path, weights_only=False)
            return {"own": watch.own, "end": digest(model)}

        return [fit(), fit(folder / "epoch=1.ckpt")]

    return {algorithm: run(algorithm) for algorithm in ("decentralized", "diloco")}


def learning_rate_finder() -> Any:
    """Lightning ends the finder's loop of 5 steps as it ends a fit, and then continues to train."""
    recorder = tb.observe.Recorder()
    model = Net("bytegrad")
    model.lr = 0.01
    finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None, update_attr=False)
    strategy = BaguaStrategy("bytegrad", observers=[recorder])
    trainer = trainer_of(strategy, max_epochs=1, callbacks=[finder], default_root_dir=FOLDER)
    trainer.fit(model, loader())
    return {"buckets": [event.phase for event in recorder.events].count("bucket"), "end": digest(model)}


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(), build()

    def forward(self, x: torch.Tensor, is_second: int) -> torch.Tensor:
        return (self.first, self.second)[is_second](x)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.first, self.second)]


class Manual(lightning.LightningModule):
    """Steps two optimizers, each for one part of the model, with manual optimization."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm, self.automatic_optimization = algorithm, False
        self.nets = Pair()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for is_second, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward((self.nets(x, is_second) - y).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.nets.optimizers()


def manual() -> Any:
    own = {"find_unused_parameters": True}

    def run(algorithm: str | None) -> Any:
        recorder, watch, model = tb.observe.Recorder(), Watch(), Manual(algorithm or "")
        strategy: Any = lightning.pytorch.strategies.DDPStrategy(**own)
        if algorithm is not None:
            strategy = BaguaStrategy(algorithm, observers=[recorder], **own)
        trainer_of(strategy, max_epochs=1, callbacks=[watch]).fit(model, loader())
        phases = [event.phase for event in recorder.events]
        counts = {"steps": phases.count("step"), "buckets": phases.count("bucket")}
        return {**counts, "own": watch.own, "end": digest(model)}

    def plain_loop() -> Any:
        ddp = DistributedDataParallel(Pair(), **own)
        optimizers = ddp.module.optimizers()
        with tb.attach(ddp, optimizers, "decentralized"):
            for x, y in loader():
                for is_second, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    (ddp(x, is_second) - y).square().mean().backward()
                    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                    optimizer.step()
        ddp.module.algorithm = "decentralized"
        return {"end": digest(ddp.module), "steps": 10}

    results = {str(name): run(name) for name in (None, "gradient_allreduce", "bytegrad", "decentralized")}
    return {**results, "decentralized, plain loop": plain_loop()}


class Overflowing(Net):
    """In batch 3, rank 1's loss is Inf."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 3 and dist.get_rank() == 1 else loss


def overflow() -> Any:
    def run(algorithm: str) -> Any:
        steps = []
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))

        class Count(lightning.Callback):
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                (optimizer,) = trainer.optimizers
                optimizer.register_step_post_hook(lambda *_: steps.append(trainer.fit_loop.batch_idx))

        model = Overflowing(algorithm)
        trainer = trainer_of(algorithm, max_epochs=1, plugins=[plugin], callbacks=[Count()], gradient_clip_val=1.0)
        trainer.fit(model, loader())
        return {"steps": steps, "scale": plugin.scaler.get_scale(), "end": digest(model)}

    return {name: run(name) for name in ALGORITHMS if name != "async"}


def twice() -> Any:
    def run(algorithm: str) -> Any:
        model = Net(algorithm)
        trainer = trainer_of(algorithm, max_epochs=1)
        trainer.fit(model, loader())
        first = digest(model)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader())
        trainer.validate(model, loader(), verbose=False)
        return {"first": first, "second": digest(model), "steps": trainer.global_step}

    return each_algorithm(run)


class Failing(Net):
    where: str
    error: type[BaseException]
    ranks: tuple[int, ...]

    def _fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 3 and dist.get_rank() in self.ranks:
            raise self.error("of the user's")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._fail("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._fail("validation", batch_idx)
        dist.all_reduce(torch.zeros(1))  # as metrics do


def fail_in(where: str, error: type[BaseException], ranks: tuple[int, ...], algorithm: str) -> Any:
    model = Failing(algorithm)
    model.where, model.error, model.ranks = where, error, ranks
    options = {"sync_interval_ms": 1} if algorithm == "async" else ALGORITHMS[algorithm]
    strategy = BaguaStrategy(algorithm, **options)
    trainer = trainer_of(strategy)
    try:
        trainer.fit(model, loader(), loader())
        raised = "nothing"
    except BaseException as caught:
        raised = type(caught).__name__
    return {"raised": raised, "threads": threads(), "is detached": strategy.attachment is None}


def failing_everywhere() -> Any:
    kinds = {
        "training": ("training", ZeroDivisionError),
        "validation": ("validation", ZeroDivisionError),
        "interrupt": ("training", KeyboardInterrupt),
    }
    return each_algorithm(lambda algorithm: {kind: fail_in(*case, (0, 1), algorithm) for kind, case in kinds.items()})


def rank_1_fails_in_training() -> Any:
    return fail_in("training", ZeroDivisionError, (1,), "bytegrad")


def rank_1_fails_in_validation() -> Any:
    return fail_in("validation", ZeroDivisionError, (1,), "async")


def saved_by_an_exception() -> Any:
    """Check the checkpoint that Lightning saves after an exception, and continue a run from it."""
    model = Failing("decentralized")
    model.where, model.error, model.ranks = "training", ZeroDivisionError, (0, 1)
    checkpoint = ModelCheckpoint(FOLDER / "exception", "last", save_on_exception=True)
    with contextlib.suppress(ZeroDivisionError):
        trainer_of("decentralized", callbacks=[checkpoint], enable_checkpointing=True).fit(model, loader())
    path = FOLDER / "exception" / "last.ckpt"
    has_states = "torchbagua" in torch.load(path, weights_only=True)
    model = Net("decentralized")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of("decentralized").fit(model, loader(), ckpt_path=path)
    messages = [str(warning.message) for warning in caught if "torchbagua" in str(warning.message)]
    return {"has_states": has_states, "warnings": messages, "end": digest(model)}


def one_device() -> Any:
    """Compare with Lightning's single-device strategy, in one process."""

    def run(algorithm: str, strategy: Any, **options: Any) -> str:
        model = Net(algorithm)
        trainer_of(strategy, devices=1, **options).fit(model, loader(), loader())
        return digest(model)

    def both(algorithm: str) -> Any:
        alone = lightning.pytorch.strategies.SingleDeviceStrategy(torch.device("cpu"))
        return [run(algorithm, alone, accelerator="auto"), run(algorithm, algorithm)]

    # Past its warm-up, QAdamOptimizer cannot step without its algorithm.
    return {algorithm: both(algorithm) for algorithm in ALGORITHMS if algorithm != "qadam"}


def qadam_refusals() -> Any:
    """Return the errors about optimizers that QAdam does not support."""

    def run(choose: Callable[[Any], Any], **options: Any) -> str:
        model = Net("qadam")
        model.configure_optimizers = lambda: choose(model)
        try:
            trainer_of(BaguaStrategy("qadam", **options), devices=1).fit(model, loader())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def adam(model: Any) -> Any:
        return tb.QAdamOptimizer(model.parameters())

    def scheduled(model: Any) -> Any:
        optimizer = adam(model)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]

    return {
        "Adam": run(lambda model: torch.optim.Adam(model.parameters())),
        "two schedulers": run(scheduled),
        "QAdam": run(adam),
        "another value": run(adam, compression="sign1bit"),
    }


def from_two_ranks() -> Any:
    """Load the checkpoints of `resume` in one process."""

    def run(algorithm: str) -> str:
        path = FOLDER / f"{algorithm}-False" / "epoch=1.ckpt"
        try:
            trainer_of(algorithm, devices=1, max_epochs=3).fit(Net(algorithm), loader(), ckpt_path=path)
        except ValueError as error:
            return str(error)
        return "accepted"

    return each_algorithm(run)


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        try:
            result = {"result": globals()[name]()}
        except BaseException:
            result = {"failure": traceback.format_exc()}
        (FOLDER / f"{name}-rank{dist.get_rank()}.json").write_text(json.dumps(result))
        if "failure" in result:
            break


if __name__ == "__main__":
    main()
