"""attach for programs that use accelerate. Call it after `prepare`; `save_state` and `load_state` handle every rank."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua.integrations.common import check_uses_ddp, framework, without_compiler
from torchbagua.integrations.rank_files import load_rank_state, save_rank_state

with framework("accelerate", tested="1.15.0", adapter="torchbagua.integrations.accelerate") as _tested:
    import accelerate


def attach(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: tb.Algorithm | str,
    **options: Any,
) -> tb.Attachment:
    """Let an algorithm communicate for a prepared model, until you detach it. Collective.

    The GradScaler of `accelerator` is passed to `torchbagua.attach`, unless `options` has another one. Until you
    detach, `accelerator.save_state` writes the mean of the ranks' weights as the model. Alongside the model it writes
    `torchbagua_<rank>.pt` for each rank, with everything that this rank needs to continue with
    bitwise identical results. `accelerator.load_state` restores each rank's own state. Call both on all ranks. Hooks
    that you register with `register_save_state_pre_hook` get the model with the mean, too.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the model that `accelerator.prepare` returned.
        optimizer: the optimizer, or a list of the optimizers, that `accelerator.prepare` returned.
        algorithm: an algorithm, or its registered name.
        options: keyword arguments of [`torchbagua.attach`][torchbagua.attach], `observers` for instance.

    Returns:
        The Attachment that `torchbagua.attach` returns: a context manager that detaches on exit.

    Raises:
        TypeError, ValueError: `model` or `optimizer` is not what `prepare` returned, or accelerate creates no
            DistributedDataParallel, for instance in a single process. Also raised by `torchbagua.attach`.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(f"attach: accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    check_uses_ddp(accelerator)
    _tested.check_names(accelerator, ["_models", "_optimizers", "_custom_objects"])
    ddp = without_compiler(model)
    order = "call attach after model, optimizer = accelerator.prepare(model, optimizer)"
    if not isinstance(ddp, DistributedDataParallel) or id(ddp.module) not in map(id, accelerator._models):
        raise ValueError(
            "attach: model must be the DistributedDataParallel that accelerator.prepare returned, got "
            f"{type(model).__name__}; {order}"
        )
    prepared = {id(item) for wrapper in accelerator._optimizers for item in (wrapper, wrapper.optimizer)}
    for given in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        if id(given) not in prepared:
            raise ValueError(
                f"attach: optimizer must be what prepare returned, got another {type(given).__name__}; {order}"
            )
    attachment = tb.attach(ddp, optimizer, algorithm, **{"grad_scaler": accelerator.scaler, **options})
    _RankStates.of(accelerator, ddp.module).keep(attachment)
    if "save_state" not in vars(accelerator):
        save = accelerator.save_state
        setattr(accelerator, "save_state", wraps(save)(partial(_save_means, accelerator, save)))  # noqa: B010 - mypy
    return attachment


def _save_means(accelerator: accelerate.Accelerator, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `save` while attached models have the mean of the ranks' weights; accelerate calls no hook after it."""
    with ExitStack() as means:
        for item in accelerator._custom_objects:
            if isinstance(item, _RankStates):
                item.enter_mean(means)
        return save(*args, **kwargs)


class _RankStates:
    """Makes `save_state` and `load_state` save and load each rank's state. accelerate itself saves rank 0's only.

    accelerate calls hooks before it saves and before it loads, and passes them the folder. It calls registered objects
    after it has loaded, without the folder.
    """

    def __init__(self, accelerator: accelerate.Accelerator, module: torch.nn.Module) -> None:
        self._accelerator = accelerator
        self._module = weakref.ref(module)  # weak, so that accelerator.free_memory can free it
        self._attachment: tb.Attachment | None = None
        self._files = Path()
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._before_save),
            accelerator.register_load_state_pre_hook(self._before_load),
        ]
        accelerator.register_for_checkpointing(self)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, module: torch.nn.Module) -> "_RankStates":
        """Return the module's object from an earlier attachment, or a new one. Objects of freed models are removed.

        The object is reused, since accelerate numbers the registered objects.
        """
        for stale in [item for item in accelerator._custom_objects if isinstance(item, cls) and not item._is_prepared]:
            stale._remove()
        found = [item for item in accelerator._custom_objects if isinstance(item, cls) and item._module() is module]
        return found[0] if found else cls(accelerator, module)

    def keep(self, attachment: tb.Attachment) -> None:
        """Save and load for `attachment` until it is detached."""
        self._attachment = attachment
        attachment.runner.on_close(partial(setattr, self, "_attachment", None))  # the attachment references the model

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._accelerator._custom_objects = [item for item in self._accelerator._custom_objects if item is not self]

    @property
    def _is_prepared(self) -> bool:
        """Whether the accelerator still has the model: `free_memory` drops all models."""
        return any(model is self._module() for model in self._accelerator._models)

    @property
    def _running(self) -> tb.Attachment | None:
        return self._attachment if self._is_prepared else None

    def enter_mean(self, means: ExitStack) -> None:
        """Give the model the mean of the ranks' weights until `means` is closed, if an algorithm is attached."""
        if (attachment := self._running) is None:
            return
        try:
            means.enter_context(attachment.averaged_weights())
        except tb.CommunicationError as error:
            raise tb.CommunicationError(
                "torchbagua: accelerator.save_state saves the mean of the ranks' weights, so all ranks must call it, "
                f"not the main process alone. {error}"
            ) from error

    # Other hooks may have taken the models and their weights out of the lists that accelerate passes.
    def _before_save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if (attachment := self._running) is not None:
            self._note_folder(folder)
            save_rank_state(attachment, self._files, self._accelerator.process_index)

    def _before_load(self, models: list[torch.nn.Module], folder: str) -> None:
        if self._running is not None:
            self._note_folder(folder)
            if not any(Path(folder).glob("torchbagua*_*.pt")):
                self._refuse()  # before accelerate loads half of the checkpoint and then fails on registered objects

    def _refuse(self) -> None:
        raise ValueError(
            f"accelerator.load_state: {self._files.parent} was saved when no algorithm was attached; "
            "load it before attach"
        )

    def _note_folder(self, folder: str) -> None:
        index = [model is self._module() for model in self._accelerator._models].index(True)
        self._files = Path(folder) / ("torchbagua" if index == 0 else f"torchbagua_model{index}")

    def state_dict(self) -> dict[str, int]:
        """Return the state that accelerate writes once, for all ranks."""
        return {"is_attached": self._running is not None, "num_ranks": self._accelerator.num_processes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load this rank's state, if an algorithm is attached."""
        if (attachment := self._running) is not None:
            if not state["is_attached"]:
                self._refuse()
            load_rank_state(attachment, self._files, state.get("num_ranks", self._accelerator.num_processes))
