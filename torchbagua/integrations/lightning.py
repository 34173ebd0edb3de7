"""Lightning: a DDPStrategy in which an algorithm communicates. Importing this module registers it as "bagua"."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua.algorithms import init_for
from torchbagua.integrations.common import framework, take_arguments
from torchbagua.integrations.rank_files import gather_rank_states, load_gathered_rank_state

# Two packages with the same code, but separate classes and registries. pip installs the second with the first.
_PACKAGES = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)] or ["lightning"]
with framework(_PACKAGES[0], tested="2.6.6", adapter="torchbagua.integrations.lightning", extra="lightning"):
    _TREES = [import_module("lightning.pytorch" if name == "lightning" else name) for name in _PACKAGES]

# The arguments passed on to DDPStrategy: its own, and those of DDP that neither DDPStrategy nor the algorithm sets.
_PASSED_ON = {"process_group_backend", "start_method", "timeout", *signature(DistributedDataParallel).parameters} - {
    *("module", "device_ids", "output_device", "process_group", "device_mesh"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),  # gradients that bypass communication hooks
    "mixed_precision",  # installs its own communication hook
}
_KEY = "torchbagua"  # in a checkpoint: what each rank's Attachment.rank_state_dict returned
_Base: Any = object


class _BaguaStrategy(_Base):
    """The mixin that precedes the DDPStrategy of either package."""

    _tree: Any

    def __init__(
        self,
        algorithm: str | tb.Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        averaged_weights: bool = True,
        observers: Sequence[tb.observe.Observer] = (),
        **bagua_kwargs: Any,
    ) -> None:
        arguments = take_arguments("BaguaStrategy", algorithm, bagua_kwargs, _PASSED_ON)
        positional = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(*positional, **{"gradient_as_bucket_view": flatten, **bagua_kwargs})
        self._algorithm, self._arguments = algorithm, arguments
        self._averaged_weights, self._observers = averaged_weights, observers
        self.attachment: tb.Attachment | None = None
        self._running, self._validation = ExitStack(), ExitStack()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not isinstance(self.model, DistributedDataParallel):  # the Trainer validates, tests or predicts
            return
        is_adam = [isinstance(optimizer, tb.QAdamOptimizer) for optimizer in self.optimizers]
        if self._algorithm == "qadam" and (is_adam != [True] or len(self.lr_scheduler_configs) > 1):
            raise self._tree.utilities.exceptions.MisconfigurationException(
                "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
            )
        algorithm = init_for(self._algorithm, self.optimizers, **self._arguments)
        self._running.callback(setattr, self, "attachment", None)
        options: Any = {"observers": self._observers, "grad_scaler": getattr(self.precision_plugin, "scaler", None)}
        self.attachment = self._running.enter_context(tb.attach(self.model, self.optimizers, algorithm, **options))
        self._validation = self._running.enter_context(ExitStack())

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.attachment is not None and self._averaged_weights:
            self._validation.enter_context(self.attachment.averaged_weights())

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._validation.close()

    def _saved(self) -> tb.Attachment | None:
        """Return the attachment; None if Lightning saves due to an exception: other ranks may not save then."""
        return None if self.lightning_module.trainer.interrupted else self.attachment

    def lightning_module_state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = super().lightning_module_state_dict()
        attachment = self._saved() if self._averaged_weights else None
        if attachment is None or not attachment.runner.averages_weights:
            return own
        with attachment.averaged_weights():
            return copy.deepcopy(own)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (attachment := self._saved()) is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = gather_rank_states(attachment)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.attachment is not None:
            load_gathered_rank_state(self.attachment, checkpoint.get(_KEY))

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._running.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        self._running.close()
        super().teardown()


class BaguaStrategy(_BaguaStrategy, _TREES[0].strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy with an algorithm of torchbagua: `Trainer(strategy=BaguaStrategy("bytegrad"))`.

    It attaches the algorithm when `fit` begins and detaches it when `fit` ends. `Trainer(strategy="bagua")` uses the
    defaults. The base class is from the package `lightning`, or from `pytorch_lightning` if only that is installed.

    A checkpoint stores each rank's `Attachment.rank_state_dict`, under "torchbagua", and `fit(ckpt_path=...)` continues
    from it with bitwise identical results. A checkpoint that Lightning saves due to an exception has rank 0's weights
    only.

    Args:
        algorithm: an algorithm, or its registered name.
        flatten: DDP's `gradient_as_bucket_view`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy. Its GradScaler is passed to `attach`.
        averaged_weights: validate the mean of the ranks' weights, and save it as the model. With False, each rank
            validates its own weights, and rank 0's are saved. It makes no difference with a gradient algorithm.
        observers: as in `attach`.
        bagua_kwargs: arguments of the algorithm that `algorithm` names; `process_group_backend`, `start_method` and
            `timeout` of DDPStrategy; and the arguments of DistributedDataParallel.

    Attributes:
        attachment: the Attachment while `fit` runs; else None.

    Raises:
        KeyError, TypeError, ValueError: no algorithm has that name, or an argument is unknown or invalid.
    """

    _tree = _TREES[0]


class PytorchLightningBaguaStrategy(_BaguaStrategy, _TREES[-1].strategies.DDPStrategy):  # type: ignore[misc]
    """`BaguaStrategy` for the Trainer of `pytorch_lightning`, which does not accept strategies of `lightning`."""

    _tree = _TREES[-1]


for _strategy in (BaguaStrategy, PytorchLightningBaguaStrategy):
    if "bagua" not in _strategy._tree.strategies.StrategyRegistry:
        _strategy._tree.strategies.StrategyRegistry.register("bagua", _strategy, "DDP with an algorithm of torchbagua")
