"""attach for transformers' Trainer: one call installs an algorithm in its training, checkpoints and logs."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torchbagua as tb
from torchbagua.algorithms import init_for
from torchbagua.integrations.common import check_options, check_uses_ddp, framework, without_compiler
from torchbagua.integrations.rank_files import load_noted_rank_state, save_rank_state
from torchbagua.observe.events import CommEvent
from torchbagua.observe.figures import Figures
from torchbagua.observe.tensorboard import scalars
from torchbagua.runtime.optimizer_steps import unwrap
from torchbagua.training.checks import check_algorithm

with framework("transformers", tested="5.23.0", adapter="torchbagua.integrations.transformers") as _tested:
    import accelerate  # noqa: F401 - without it transformers can be imported, but creates no Trainer
    import transformers

_MARK = "_torchbagua_attached"
_NOTE = "torchbagua"  # key in trainer_state.json: the step and number of ranks of the algorithm's state alongside it


def attach(trainer: transformers.Trainer, algorithm: tb.Algorithm | str, **options: Any) -> "TrainerAttachment":
    """Let an algorithm communicate for a Trainer while it trains. Call it before `trainer.train`.

    Subclasses of Trainer are supported too. After the call:

    - The algorithm is attached while the trainer trains: to the model that the trainer has wrapped, its optimizer and
      its GradScaler. It is detached before the trainer loads the best model, or when training raises.
    - Checkpoints contain the mean of the ranks' weights and, for each rank, `torchbagua_<rank>.pt` with everything that
      this rank needs to continue with bitwise identical results. `trainer.train(resume_from_checkpoint=...)` loads it.
    - `evaluate` and `predict` use the mean of the ranks' weights.
    - Logs of the loss include this rank's cost of communication per step since the last log: `torchbagua/step_ms`,
      `exposed_ms`, `overlap_percent`, `sent_MB_a_step` and `compression_ratio_to_float32`.

    Args:
        trainer: a Trainer that is not training.
        algorithm: an algorithm, or its registered name. For QAdam, create the trainer with `optimizers=(qadam, None)`.
        options: keyword arguments of [`torchbagua.attach`][torchbagua.attach], `observers` for instance.

    Raises:
        TypeError, ValueError: `trainer` is not a Trainer, is already training or attached, or does not use DDP; or an
            argument is invalid.
        KeyError: no algorithm has that name.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"attach: trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if trainer.is_in_train:
        raise ValueError("attach: trainer is training, or its training failed; call attach before trainer.train")
    if hasattr(trainer, _MARK):
        raise ValueError("attach: an algorithm is attached to the trainer already; detach it first")
    check_uses_ddp(trainer.accelerator)
    check_algorithm("attach", algorithm)
    check_options(options)
    if trainer.optimizer is not None:
        init_for(algorithm, [unwrap(trainer.optimizer)])
    elif algorithm == "qadam" and type(trainer).create_optimizer is transformers.Trainer.create_optimizer:
        raise ValueError("attach: qadam needs a QAdamOptimizer; create the trainer with optimizers=(q_adam, None)")
    return TrainerAttachment(trainer, algorithm, options)


class TrainerAttachment:
    """An algorithm that a Trainer uses whenever it trains.

    Attributes:
        attachment: the Attachment of the current training, or else of the last one; None before the first training.
    """

    attachment: tb.Attachment | None = None

    def __init__(self, trainer: transformers.Trainer, algorithm: tb.Algorithm | str, options: dict[str, Any]) -> None:
        self._trainer, self._algorithm, self._options = trainer, algorithm, options
        self._cost = _StepCost()
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
        """Restore the trainer. A second call does nothing.

        Raises:
            RuntimeError: the trainer is training: it would save and evaluate the weights of one rank only.
        """
        if self._running is not None:
            raise RuntimeError("TrainerAttachment.detach: the trainer is training; call it after trainer.train is done")
        self._undo.close()

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._run:  # detaches
            return train(*args, **kwargs)

    def _prepare(self, prepare: Callable[..., Any], max_steps: Any, loader: Any, checkpoint: str | None) -> Any:
        prepared = prepare(max_steps, loader, checkpoint)
        trainer, self._cost = self._trainer, _StepCost()
        observers = [*self._options.get("observers", []), self._cost]
        options = {"grad_scaler": trainer.accelerator.scaler, **self._options, "observers": observers}
        model = without_compiler(trainer.model_wrapped)
        self.attachment = self._run.enter_context(tb.attach(model, trainer.optimizer, self._algorithm, **options))
        if checkpoint is not None:
            note = trainer.state.stateful_callbacks.get(_NOTE, {})  # stale if a run without torchbagua copied it
            num_ranks = note["num_ranks"] if note.get("global_step") == trainer.state.global_step else 0
            load_noted_rank_state(self.attachment, Path(checkpoint) / "torchbagua", num_ranks)
        return prepared

    def _finalize(self, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.close()
        return finalize(*args, **kwargs)

    def _save(self, save: Callable[..., None], model: Any, trial: Any) -> None:
        args, state = self._trainer.args, self._trainer.state
        attachment = None if args.save_only_model else self._running
        if attachment is not None:
            state.stateful_callbacks[_NOTE] = {"global_step": state.global_step, "num_ranks": args.world_size}
        self._with_mean(save, model, trial)
        state.stateful_callbacks.pop(_NOTE, None)
        if attachment is not None:
            folder = Path(self._trainer._get_output_dir(trial=trial)) / f"checkpoint-{state.global_step}"
            save_rank_state(attachment, folder / "torchbagua", args.process_index)

    def _with_mean(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._running is None else self._running.averaged_weights():
            return method(*args, **kwargs)

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        log({**logs, **(self._cost.take() if "loss" in logs else {})}, *args, **kwargs)

    @property
    def _running(self) -> tb.Attachment | None:
        return None if self.attachment is None or self.attachment.is_detached else self.attachment


class _StepCost:
    """An observer that sums the communication cost of the steps since the last `take`."""

    def __init__(self) -> None:
        self._events: list[CommEvent] = []
        self._figures = Figures()

    def on_comm(self, event: CommEvent) -> None:
        self._events.append(event)
        if event.phase == "step":
            self._figures.add(self._events)
            self._figures.bucket_ns.clear()  # it would grow forever if nothing is logged
            self._events.clear()

    def take(self) -> dict[str, float]:
        """Return the values of TensorBoardTrace's overview, and reset; return an empty dict if no step has ended."""
        figures, self._figures = self._figures, Figures()
        shown = scalars(figures, sent_bytes=0).items() if figures.num_steps else ()
        return {tag.replace("communication", "torchbagua"): v for tag, v in shown if tag.startswith("communication/")}
