"""attach for transformers' Trainer: one line, and its training, checkpoints and logs know of the algorithm."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torchbagua as tb
from torchbagua.accelerate import check_uses_ddp, without_compiler
from torchbagua.events import CommEvent
from torchbagua.frameworks import framework
from torchbagua.rank_states import load_rank_state, save_rank_state
from torchbagua.traces.charts import scalars
from torchbagua.traces.figures import Figures
from torchbagua.user_warning import warn_user

with framework("transformers", tested="5.23.0", adapter="torchbagua.transformers") as _tested:
    import transformers

_MARK = "_torchbagua_attached"


def attach(trainer: transformers.Trainer, algorithm: tb.Algorithm | str, **options: Any) -> "TrainerAttachment":
    """Put an algorithm in charge of what a Trainer communicates when it trains. Call it before `trainer.train`.

    Trainers of subclasses are taken too. From then on:

    - The algorithm is attached while the trainer trains: to the model that it has wrapped, its optimizer and its
      GradScaler. It is detached before the trainer loads the best model, or where training raises.
    - Checkpoints hold the mean of the ranks' weights, and for each rank `torchbagua_<rank>.pt`, all that this rank
      needs to go on bit for bit. `trainer.train(resume_from_checkpoint=...)` reads it.
    - `evaluate` and `predict` use the mean of the ranks' weights.
    - Logs of the loss have what communication cost this rank in a step, since the last log: `torchbagua/step_ms`,
      `exposed_ms`, `overlap_percent`, `sent_MB_a_step` and `compression_ratio_to_float32`.

    Args:
        trainer: a Trainer that is not training.
        algorithm: an algorithm, or its registered name. For QAdam, make the trainer with `optimizers=(qadam, None)`.
        options: of [`torchbagua.attach`][torchbagua.attach], `observers` for instance.

    Raises:
        TypeError, ValueError: `trainer` is no Trainer, is training or attached already, or does not use DDP.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"attach: trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if trainer.is_in_train:
        raise ValueError("attach: trainer is training, or has failed to; call attach before trainer.train")
    if hasattr(trainer, _MARK):
        raise ValueError("attach: an algorithm is attached to the trainer already; detach it first")
    check_uses_ddp(trainer.accelerator)
    return TrainerAttachment(trainer, algorithm, options)


class TrainerAttachment:
    """An algorithm that a Trainer uses whenever it trains.

    Attributes:
        attachment: that of the training that is on, or else of the last one; None before the first.
    """

    attachment: tb.Attachment | None = None

    def __init__(self, trainer: transformers.Trainer, algorithm: tb.Algorithm | str, options: dict[str, Any]) -> None:
        self._trainer, self._algorithm, self._options = trainer, algorithm, options
        self._cost = _Cost()
        self._run, self._undo = ExitStack(), ExitStack()
        around: dict[str, Callable[..., Any]] = {
            "_inner_training_loop": self._train,
            "_prepare_for_training": self._prepare,
            "_finalize_training": self._finalize,
            "_save_checkpoint": self._save,
            "evaluate": self._with_mean,
            "predict": self._with_mean,
            "log": self._log,
        }
        _tested.check_names(trainer, around)
        for name, method in around.items():
            setattr(trainer, name, wraps(original := getattr(trainer, name))(partial(method, original)))
            self._undo.callback(delattr, trainer, name)
        setattr(trainer, _MARK, True)
        self._undo.callback(delattr, trainer, _MARK)

    def detach(self) -> None:
        """Give the trainer back as it was. A second call does nothing."""
        self._undo.close()

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._run:  # detaches
            return train(*args, **kwargs)

    def _prepare(self, prepare: Callable[..., Any], max_steps: Any, loader: Any, checkpoint: str | None) -> Any:
        prepared = prepare(max_steps, loader, checkpoint)
        trainer, self._cost = self._trainer, _Cost()
        observers = [*self._options.get("observers", []), self._cost]
        options = {"grad_scaler": trainer.accelerator.scaler, **self._options, "observers": observers}
        model = without_compiler(trainer.model_wrapped)
        self.attachment = self._run.enter_context(tb.attach(model, trainer.optimizer, self._algorithm, **options))
        if checkpoint is not None:
            if any(Path(checkpoint).glob("torchbagua_*.pt")):
                load_rank_state(self.attachment, Path(checkpoint) / "torchbagua", trainer.args.process_index)
            else:
                warn_user(f"torchbagua: {checkpoint} has no state of an algorithm; it starts anew from these weights")
        return prepared

    def _finalize(self, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.close()
        return finalize(*args, **kwargs)

    def _save(self, save: Callable[..., None], model: Any, trial: Any) -> None:
        self._with_mean(save, model, trial)
        trainer = self._trainer
        if self._running is not None and not trainer.args.save_only_model:
            folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
            save_rank_state(self._running, folder / "torchbagua", trainer.args.process_index)

    def _with_mean(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._running is None else self._running.averaged_weights():
            return method(*args, **kwargs)

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        log({**logs, **(self._cost.take() if "loss" in logs else {})}, *args, **kwargs)

    @property
    def _running(self) -> tb.Attachment | None:
        return None if self.attachment is None or self.attachment.is_detached else self.attachment


class _Cost:
    """An observer that adds up what steps cost since it was asked last."""

    def __init__(self) -> None:
        self._events: list[CommEvent] = []
        self._figures = Figures()

    def on_comm(self, event: CommEvent) -> None:
        """Add the events of a step when it ends."""
        self._events.append(event)
        if event.phase == "step":
            self._figures.add(self._events)
            self._figures.bucket_ns.clear()  # which would grow for ever where nothing is logged
            self._events.clear()

    def take(self) -> dict[str, float]:
        """Return what TensorBoardTrace shows in its overview, and begin again; nothing where there was no step."""
        figures, self._figures = self._figures, Figures()
        shown = scalars(figures, sent_bytes=0).items() if figures.num_steps else ()
        return {tag.replace("communication", "torchbagua"): v for tag, v in shown if tag.startswith("communication/")}
