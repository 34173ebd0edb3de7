"""Run the scenarios of test_transformers.py on one rank, and write their results to a file; started by torchrun.

Argument: a folder, for checkpoints, logs and `<rank>.json`.
"""

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import scenarios
import torch
from scenarios import FOLDER, STEPS, STOP, error_of, threads_since, weights_of
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

import torchbagua as tb
from torchbagua.integrations.transformers import TrainerAttachment, attach

BATCH = 4
BY_NAME = ("gradient_allreduce", "qadam", "low_precision_decentralized")
ALGORITHMS: dict[str, tb.Algorithm | str] = {
    name: name if name in BY_NAME else make(None) for name, make in scenarios.ALGORITHMS.items()
}


class Regression(nn.Module):
    """A model that computes its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


class OwnTrainer(Trainer):
    """A Trainer that overrides the loss and the logging, as TRL's trainers do."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return model(**inputs)["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "own": 1.0}, start_time)


TRAINERS = {"Seq2SeqTrainer": (Seq2SeqTrainer, Seq2SeqTrainingArguments), "OwnTrainer": (OwnTrainer, TrainingArguments)}


def data(accumulation: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return the data of STEPS steps on two ranks."""
    x = torch.randn(2 * BATCH * STEPS * accumulation, 16, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()[None]} for row in x]


def make(name: str, accumulation: int = 1, kind: str = "", callbacks: Any = None, **options: Any) -> Trainer:
    """Return a trainer for this rank."""
    trainer_class, arguments_class = TRAINERS.get(kind, (Trainer, TrainingArguments))
    arguments = {
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "logging_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "output_dir": str(FOLDER / "out"),
    }
    model = Regression()
    optimizer = scenarios.optimizer_for(name, model) if name == "qadam" else None
    rows = data(accumulation)
    return trainer_class(
        model,
        arguments_class(**{**arguments, **options}),
        train_dataset=rows,
        eval_dataset=rows[:8],
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


class Spy(TrainerCallback):
    """Records the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, list[float]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.weights.append(weights_of(model))


def runs() -> dict[str, Any]:
    """Train with every algorithm, with and without accumulation, and in a plain loop."""
    found: dict[str, Any] = {}
    for name, algorithm in ALGORITHMS.items():
        found[name] = {}
        for accumulation in (1, 2):
            counts, spy = scenarios.Counts(), Spy()
            trainer = make(name, accumulation, callbacks=[spy])
            attach(trainer, algorithm, observers=[counts.recorder])
            trainer.train()
            weights = {"during": spy.weights[-1], "weights": weights_of(trainer.model)}
            run = {**counts.result(), "global_step": trainer.state.global_step, **weights}
            found[name][f"accumulation {accumulation}"] = run
        found[name]["plain"] = plain_loop(name, algorithm)
    return found


def plain_loop(name: str, algorithm: tb.Algorithm | str) -> dict[str, Any]:
    """Train with the same operations as a Trainer, in the same order."""
    trainer = make(name)  # only for its optimizer, schedule and order of data
    loader, optimizer = trainer.get_train_dataloader(), trainer.create_optimizer()
    scheduler = trainer.create_scheduler(STEPS, optimizer)
    ddp = nn.parallel.DistributedDataParallel(trainer.model)
    ddp.train()
    with tb.attach(ddp, optimizer, algorithm):
        for batch in loader:
            ddp(**batch)["loss"].backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights_of(trainer.model)


def resumed() -> dict[str, Any]:
    """Resume every algorithm from a checkpoint in the middle of the run."""
    found = {}
    for name, algorithm in ALGORITHMS.items():
        options = {"save_strategy": "steps", "save_steps": STOP, "output_dir": str(FOLDER / name)}
        spies = Spy(), Spy()
        trainer = make(name, callbacks=[spies[0]], **options)
        attach(trainer, algorithm)
        trainer.train()
        trainer = make(name, callbacks=[spies[1]], **options)
        attach(trainer, algorithm)
        trainer.train(resume_from_checkpoint=str(FOLDER / name / f"checkpoint-{STOP}"))
        own = torch.load(FOLDER / name / f"checkpoint-{STOP}" / f"torchbagua_{RANK}.pt", weights_only=True)
        found[name] = {
            "saved": spies[0].weights[STOP - 1],
            "straight": spies[0].weights[STOP:],
            "again": spies[1].weights,
            "keys": sorted(own),
        }
    return found


def logged() -> dict[str, Any]:
    """Train subclasses of Trainer twice with TensorBoard, then detached; return logs and patched methods."""
    found: dict[str, Any] = {}
    for kind in TRAINERS:
        trainer = make("bytegrad", kind=kind, report_to=["tensorboard"], output_dir=str(FOLDER / kind))
        attached = attach(trainer, "bytegrad")
        trainer.train()
        first = trainer.state.log_history
        trainer.train()
        assert attached.attachment is not None
        attached.detach()
        trainer.train()
        found[kind] = {
            "logs": [first, trainer.state.log_history],
            "patched": sorted(name for name in ("train", "log", "evaluate") if name in vars(trainer)),
            "detached": attached.attachment.is_detached,
        }
    return found


def evaluated() -> dict[str, Any]:
    """Evaluate, and load the best model, with an algorithm that averages weights."""
    seen: list[dict[str, list[float]]] = []

    class Evaluating(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(weights_of(self.model))
            return super().evaluation_loop(*args, **kwargs)

    TRAINERS["Evaluating"] = (Evaluating, TrainingArguments)
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1, "output_dir": str(FOLDER / "best")}
    spy = Spy()
    trainer = make("decentralized", kind="Evaluating", callbacks=[spy], learning_rate=0.1, **options)
    attach(trainer, "decentralized")
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint)).name
    files = sorted(str(path.relative_to(FOLDER / "best")) for path in (FOLDER / "best").rglob("torchbagua_*"))
    return {"seen": seen, "during": spy.weights, "best": best, "weights": weights_of(trainer.model), "files": files}


class Raise(TrainerCallback):
    """Raises an error at an event."""

    def __init__(self, event: str, error: type[BaseException]) -> None:
        def raise_error(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise error("on purpose")

        setattr(self, event, raise_error)


def exceptions() -> dict[str, list[str]]:
    """Return the threads that remain after training or evaluation has raised on all ranks."""
    found = {}
    cases = ("on_step_end", RuntimeError), ("on_prediction_step", RuntimeError), ("on_step_end", KeyboardInterrupt)
    for event, error in cases:
        before = set(threading.enumerate())
        trainer = make("async", eval_strategy="steps", eval_steps=2, callbacks=[Raise(event, error)])
        attach(trainer, ALGORITHMS["async"])
        try:
            trainer.train()
        except error:
            found[f"{event} {error.__name__}"] = threads_since(before)
    return found


def one_raises() -> dict[str, Any]:
    """Return the outcome on each rank if only rank 1 raises; runs last, since the group is unusable afterwards."""
    before = set(threading.enumerate())
    trainer = make("bytegrad", callbacks=[Raise("on_step_end", RuntimeError)] if RANK == 1 else [])
    attached = attach(trainer, "bytegrad")
    try:
        trainer.train()
    except RuntimeError as error:
        return {
            "raised": type(error).__name__,
            "is detached": attached.attachment.is_detached,
            "threads": threads_since(before),
        }
    return {}


def overflow() -> dict[str, Any]:
    """Only rank 1 has an Inf in step 2, with a GradScaler, which Trainer does not create on CPUs."""

    class Overflowing(OwnTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            if RANK == 1 and self.state.global_step == 2:
                next(self.model.parameters()).grad.fill_(float("inf"))
            return loss

    TRAINERS["Overflowing"] = (Overflowing, TrainingArguments)
    trainer = make("decentralized", kind="Overflowing", max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    attach(trainer, "decentralized")
    trainer.train()
    # Trainer also counts skipped steps; Adam counts the steps that it takes.
    steps = next(iter(trainer.optimizer.state.values()))["step"].item()
    return {"steps": steps, "scale": trainer.accelerator.scaler.get_scale(), "weights": weights_of(trainer.model)}


class Call(TrainerCallback):
    """Calls a function when training begins."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.error = error_of(self.call)


def refusals() -> dict[str, str]:
    """Return the error of each refused call."""
    trainer = make("bytegrad")
    found = {"no trainer": error_of(lambda: attach(trainer.model, "bytegrad"))}
    attached: TrainerAttachment = attach(trainer, "bytegrad")
    found["twice"] = error_of(lambda: attach(trainer, "bytegrad"))
    attached.detach()
    attached.detach()
    found["name"] = error_of(lambda: attach(trainer, "bytegrd"))
    found["class"] = error_of(lambda: attach(trainer, tb.ByteGradAlgorithm))
    found["option"] = error_of(lambda: attach(trainer, "bytegrad", observer=[]))
    found["no QAdamOptimizer"] = error_of(lambda: attach(trainer, "qadam"))
    found["another optimizer"] = error_of(lambda: attach(make_trainer_with_sgd(), "qadam"))

    # The folder contains the files of an earlier run with an algorithm, which saved the same steps.
    earlier, later = FOLDER / "low_precision_decentralized" / f"checkpoint-{STOP}", FOLDER / "no" / f"checkpoint-{STOP}"
    later.mkdir(parents=True, exist_ok=True)
    shutil.copy(earlier / f"torchbagua_{RANK}.pt", later)
    late = Call(lambda: attach(trainer, "bytegrad"))
    trainer = make("bytegrad", callbacks=[late], save_strategy="steps", save_steps=STOP, output_dir=str(FOLDER / "no"))
    trainer.train()
    found["too late"] = late.error
    early = Call(lambda: attached.detach())
    trainer = make("bytegrad", callbacks=[early])
    attached = attach(trainer, "low_precision_decentralized")
    resume = partial(trainer.train, resume_from_checkpoint=str(later))
    found["plain checkpoint"] = error_of(resume, or_warnings=True)
    found["too early"] = early.error

    shutil.copytree(earlier, own := FOLDER / f"own {RANK}" / earlier.name)
    if RANK == 1:
        (own / "torchbagua_1.pt").unlink()
    trainer = make("bytegrad")
    attach(trainer, "low_precision_decentralized")
    found["missing file"] = error_of(lambda: trainer.train(resume_from_checkpoint=str(own)))
    return found


def make_trainer_with_sgd() -> Trainer:
    """Return a trainer with an optimizer of the user."""
    model = Regression()
    arguments = TrainingArguments(output_dir=str(FOLDER), use_cpu=True, ddp_backend="gloo", report_to=[])
    return Trainer(model, arguments, optimizers=(torch.optim.SGD(model.parameters()), None))


if __name__ == "__main__":
    torch.set_num_threads(1)
    RANK = TrainingArguments(output_dir=str(FOLDER), use_cpu=True, ddp_backend="gloo").process_index
    scenarios.run(RANK, (runs, resumed, logged, evaluated, exceptions, overflow, refusals, one_raises))
    # No barrier: ranks have made different numbers of collective calls, and the launcher hosts the store.
    torch.distributed.destroy_process_group()
