"""Lightning: a DDPStrategy in which an algorithm communicates, named "bagua" once this module is imported."""

import copy
import inspect
import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms import Algorithm, QAdamOptimizer
from torchbagua.algorithms.base import init_for
from torchbagua.attach import attach
from torchbagua.attachment import Attachment
from torchbagua.events import Observer
from torchbagua.frameworks import framework, take_arguments
from torchbagua.user_warning import warn_user

# Two packages of the same code, each with classes and a registry of its own; pip installs the second with the first.
_PACKAGES = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)] or ["lightning"]
with framework(_PACKAGES[0], tested="2.6.6", adapter="torchbagua.lightning", extra="lightning"):
    _TREES = [import_module("lightning.pytorch" if name == "lightning" else name) for name in _PACKAGES]

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters.keys() - {
    "module",
    "device_ids",
    "process_group",
}
_HANDED_ON = {*_DDP_ARGUMENTS, "process_group_backend", "start_method", "timeout"}
_KEY = "torchbagua"  # in a checkpoint: what each rank's Attachment.rank_state_dict returned
_Base: Any = object


class _BaguaStrategy(_Base):
    """What stands before the DDPStrategy of either package."""

    _tree: ModuleType

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        averaged_weights: bool = True,
        observers: Sequence[Observer] = (),
        **bagua_kwargs: Any,
    ) -> None:
        arguments = take_arguments("BaguaStrategy", algorithm, bagua_kwargs, _HANDED_ON)
        positional = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(*positional, **{"gradient_as_bucket_view": flatten, **bagua_kwargs})
        self._algorithm, self._arguments = algorithm, arguments
        self._averaged_weights, self._observers = averaged_weights, observers
        self.attachment: Attachment | None = None
        self._running, self._averaged, self._is_averaged = ExitStack(), ExitStack(), False

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not isinstance(self.model, DistributedDataParallel):  # it validates, tests or predicts
            return
        algorithm = self._algorithm
        if algorithm == "qadam":
            num_adams = sum(isinstance(optimizer, QAdamOptimizer) for optimizer in self.optimizers)
            if not num_adams == len(self.optimizers) == 1 or len(self.lr_scheduler_configs) > 1:
                raise self._tree.utilities.exceptions.MisconfigurationException(
                    "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
                )
        if isinstance(algorithm, str):
            algorithm = init_for(algorithm, self.optimizers, **self._arguments)
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._running.callback(setattr, self, "attachment", None)
        self.attachment = self._running.enter_context(
            attach(self.model, self.optimizers, algorithm, grad_scaler=scaler, observers=self._observers)
        )
        self._averaged, self._is_averaged = self._running.enter_context(ExitStack()), False

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._set_averaged(self._averaged_weights)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._set_averaged(False)

    def _set_averaged(self, is_averaged: bool) -> bool:
        """Give the module the mean of ranks' weights, or this rank's own, and return whether it had the mean."""
        was_averaged, self._is_averaged = self._is_averaged, is_averaged
        if was_averaged and not is_averaged:
            self._averaged.close()
        if is_averaged and not was_averaged and self.attachment is not None:
            self._averaged.enter_context(self.attachment.averaged_weights())
        return was_averaged

    def _saved(self) -> Attachment | None:
        """The attachment, unless an exception has Lightning save: then the other ranks may not come here."""
        return None if self.attachment is None or self.lightning_module.trainer.interrupted else self.attachment

    def lightning_module_state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = super().lightning_module_state_dict()
        if self._saved() is None or not self._averaged_weights:
            return own
        was_averaged = self._set_averaged(True)
        mean = copy.deepcopy(own)
        self._set_averaged(was_averaged)
        return mean

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (attachment := self._saved()) is not None and "optimizer_states" in checkpoint:
            was_averaged, buffer = self._set_averaged(False), io.BytesIO()
            torch.save(attachment.rank_state_dict(), buffer)
            self._set_averaged(was_averaged)
            states = (io.BytesIO(self.broadcast(buffer.getvalue(), src)) for src in range(self.world_size))
            checkpoint[_KEY] = [torch.load(one, "cpu", weights_only=True) for one in states if self.is_global_zero]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.attachment is not None and _KEY in checkpoint:
            states = checkpoint[_KEY]
            self.attachment.load_rank_state_dict(states[self.global_rank if len(states) == self.world_size else 0])
        elif self.attachment is not None:
            warn_user("torchbagua: the checkpoint has no state of the ranks: they all go on from the weights in it")

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._running.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        self._running.close()
        super().teardown()


class BaguaStrategy(_BaguaStrategy, _TREES[0].strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy with an algorithm of torchbagua: `Trainer(strategy=BaguaStrategy("bytegrad"))`.

    It attaches the algorithm when `fit` begins and detaches it when it ends. `Trainer(strategy="bagua")` takes the
    defaults. It is of the package `lightning`, or of `pytorch_lightning` where that alone is installed.

    A checkpoint holds each rank's `Attachment.rank_state_dict`, under "torchbagua", and `fit(ckpt_path=...)` goes on
    from there bit for bit. One that an exception has Lightning save holds rank 0's weights only.

    Args:
        algorithm: an algorithm, or its registered name.
        flatten: DDP's `gradient_as_bucket_view`.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy. Its GradScaler is handed to `attach`.
        averaged_weights: validate the mean of the ranks' weights, and save it as the model. With False, each rank
            validates its own weights, and rank 0's are saved. All the same where gradients are averaged.
        observers: as in `attach`.
        bagua_kwargs: arguments of the algorithm that `algorithm` names; `process_group_backend`, `start_method` and
            `timeout` of DDPStrategy; and the arguments of DistributedDataParallel.

    Attributes:
        attachment: what `attach` returned, while `fit` runs; else None.

    Raises:
        KeyError: no algorithm has that name.
        TypeError, ValueError: an argument is unknown or does not fit.
    """

    _tree = _TREES[0]


class PytorchLightningBaguaStrategy(_BaguaStrategy, _TREES[-1].strategies.DDPStrategy):  # type: ignore[misc]
    """`BaguaStrategy` for the Trainer of `pytorch_lightning`, which takes no strategy of `lightning`."""

    _tree = _TREES[-1]


for _strategy in (BaguaStrategy, PytorchLightningBaguaStrategy):
    if "bagua" not in _strategy._tree.strategies.StrategyRegistry:
        _strategy._tree.strategies.StrategyRegistry.register("bagua", _strategy, "DDP with an algorithm of torchbagua")
