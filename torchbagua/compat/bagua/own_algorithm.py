"""How an algorithm that is written against Bagua's documentation runs under `attach`.

Such an algorithm has buckets of its own, whatever its tensors stand for. So for `attach` it is of the kind that
averages weights: DDP sends nothing, and what the buckets send runs on a lane.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import torchbagua as tb
from torchbagua.compat.bagua import env
from torchbagua.compat.bagua.algorithms.base import ImplFacade
from torchbagua.compat.bagua.bucket import BucketFacade
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade
from torchbagua.compat.bagua.tensor import TensorFacade, effective, proxy_of

if TYPE_CHECKING:
    from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel


_PLAIN_TYPES = (bool, int, float, str, type(None))


def is_own(algorithm: object) -> bool:
    """Return whether an algorithm is written against Bagua's documentation: it says itself what `reify` returns."""
    return isinstance(algorithm, tb.Algorithm) and type(algorithm).reify is not tb.Algorithm.reify


@dataclass(frozen=True)
class OwnAlgorithm(tb.Algorithm):
    """An algorithm of the user's, and the module that it is for."""

    averages_weights: ClassVar[bool] = True

    algorithm: tb.Algorithm
    bagua_ddp: "BaguaDistributedDataParallel" = field(repr=False)

    def arguments(self) -> dict[str, str]:
        """Return the name of the class, and those of its attributes that are plain."""
        own = {name: repr(value) for name, value in vars(self.algorithm).items() if isinstance(value, _PLAIN_TYPES)}
        return {"algorithm": type(self.algorithm).__qualname__, **own}

    def make_impl(self, runner: tb.Runner) -> "OwnImpl":
        """Return what runs what the user's `reify` returns."""
        impl: Any = self.algorithm.reify(self.bagua_ddp.process_group)  # type: ignore[arg-type]
        if not isinstance(impl, ImplFacade):
            raise TypeError(
                f"{type(self.algorithm).__name__}.reify must return an AlgorithmImpl of torchbagua.compat.bagua, got "
                f"{impl!r}; an algorithm with an impl of torchbagua's own overrides make_impl"
            )
        return OwnImpl(runner, impl)


class OwnImpl(tb.AlgorithmImpl):
    """Runs an AlgorithmImpl of the user's.

    Buckets run in their order, on all ranks the same, each when its tensors are ready and those before it have begun.
    """

    algorithm: OwnAlgorithm

    def __init__(self, runner: tb.Runner, impl: ImplFacade) -> None:
        super().__init__(runner)
        self.own = impl
        self.own_buckets: list[BucketFacade] = []
        self.ddp = self.algorithm.bagua_ddp
        self.ddp.own_impl = self
        self._are_weights = False
        self._num_steps = 0
        runner.name = type(impl).__name__
        self._weights = runner.average(tb.WeightBuckets(runner, lambda: {"optimizer steps": self._num_steps}))
        runner.replicas_diverge = lambda: self._are_weights and runner.process_group.size > 1
        runner.needs_grad_scaler, runner.agree_on_overflow = False, self._agree_on_overflow
        runner.on_close(self._forget_tensors)
        self._of_core: dict[tb.BaguaBucket, BucketFacade] = {}
        self._order: deque[BucketFacade] = deque()
        self._running: list[tuple[BucketFacade, Any]] = []
        self._groups: list[tuple[ProcessGroupFacade, tb.BaguaProcessGroup]] = []
        self._reached: set[str] = set()  # in this backward, the parameters whose gradients are there
        self._on_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None

    def init_tensors(self, module: torch.nn.Module) -> list[tb.BaguaTensor]:
        self.ddp.parameters_to_ignore = sorted({*self.ddp.parameters_to_ignore, *self.runner.ignored_names})
        tensors = self.own.init_tensors(self.ddp)
        parameters = {id(parameter) for parameter in module.parameters()}
        self._are_weights = any(id(effective(tensor)) in parameters for tensor in tensors)
        return [tb.BaguaTensor(proxy_of(tensor).name, tensor) for tensor in tensors]

    def tensors_to_buckets(self, tensors: list[tb.BaguaTensor], do_flatten: bool) -> list[tb.BaguaBucket]:
        suggested = _suggested([tensor.parameter for tensor in tensors])
        self.own_buckets = self.own.tensors_to_buckets(suggested, self.ddp.gradient_as_bucket_view)
        self._of_core = {one.bind(self, self.runner.process_group): one for one in self.own_buckets}
        self._order = deque(self.own_buckets)
        return list(self._of_core)

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        self.own.init_operations(self.ddp, self._of_core[bucket])

    def reset(self) -> None:
        self.wait_pending()
        super().reset()
        self._on_step = self.own.init_post_optimizer_step_hook(self.ddp)

    def need_reset(self) -> bool:
        """False: before each forward the user's `need_reset` is asked."""
        return False

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Nothing: the user's algorithm knows of no loads."""

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None]:
        return self._before_forward

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None]:
        return self._on_gradient

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._after_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> None:
        """Nothing at the end of a training step; the user's hook is called after each step of each optimizer."""
        for watch in self.runner.step_watches:
            watch.add(self._after_step)
            self.runner.on_close(partial(watch.remove, self._after_step))

    def _agree_on_overflow(self, found_inf: bool) -> bool:
        if not self.runner.replicas_diverge():
            return found_inf
        return self._weights.lockstep.agree_on_overflow(found_inf)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.wait_pending()
        if not self.runner.replicas_diverge():
            yield
            return
        self._select_weights()
        with self._weights.means.averaged():
            yield

    def run_ready(self) -> None:
        """Run the buckets whose turn it is."""
        while self._order[0].is_ready:
            first = self._order[0]
            self._order.rotate(-1)
            first.begin()
            self._running.append((first, self.runner.lane.submit(first.core.run)))

    def wait_pending(self) -> None:
        """Wait for the buckets that run, and have their tensors stand for the results."""
        while self._running:
            one, job = self._running.pop(0)
            job.result()
            one.end()

    def open_group(self, group: ProcessGroupFacade | None, device: torch.device) -> tb.BaguaProcessGroup | None:
        """Return the private groups for another group than that of the algorithm. Collective."""
        if group is None or group.torch_group is self.runner.process_group.process_group:
            return None
        for known, opened in self._groups:
            if known.torch_group is group.torch_group:
                return opened
        opened = group.open()
        self._groups.append((group, opened))
        opened.open()
        opened.move_beside_training()
        opened.use_device(device)
        return opened

    def finish(self) -> bool:
        """Take the last mean where weights were communicated."""
        self.wait_pending()
        if self.runner.replicas_diverge():
            self._select_weights()
            self._weights.means.take()
        return self._are_weights

    def _forget_tensors(self) -> None:
        for _, opened in self._groups:
            opened.close()
        for one in self.own_buckets:
            for tensor in one.tensors:
                tensor._bagua_proxy = None  # type: ignore[attr-defined]

    def _select_weights(self) -> None:
        self._weights.make_buckets(self._weights.select(self.ddp.module, self.runner.ignored_names))

    def _before_forward(self, inputs: Any) -> None:
        self._reached.clear()
        self.ddp.bagua_train_step_counter += 1
        if self.own.need_reset():
            self.wait_pending()
            self.ddp.broadcast_from_first_rank()  # what comes may rely on equal weights, and so far they may differ
            self.reset()
        self.own.init_forward_pre_hook(self.ddp)(inputs)

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self.ddp.require_backward_grad_sync:
            self._reached.add(name)
            self.own.init_backward_hook(self.ddp)(name, parameter)

    def _after_backward(self) -> None:
        if not self.ddp.require_backward_grad_sync:
            return
        if self.ddp.find_unused_parameters:
            for name, parameter in self.ddp.bagua_build_params():
                if name not in self._reached:
                    self.own.init_backward_hook(self.ddp)(name, TensorFacade.bagua_ensure_grad(parameter))
        self._reached.clear()
        self.own.init_post_backward_hook(self.ddp)()
        waiting = [one for one in self._order if one.is_begun]
        if waiting and not self._are_weights:
            raise RuntimeError(
                f"torchbagua.compat.bagua: backward has ended, and bucket {self._order[0].name} has not run: "
                f"{self._order[0].missing()}. If they are not used in every backward, put their names into the "
                "module's _bagua_params_and_buffers_to_ignore, or use DistributedDataParallel with "
                "find_unused_parameters=True"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        if is_taken:
            self._num_steps += 1
            self._on_step(optimizer)


def _suggested(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one dtype, and of at most `env.get_default_bucket_size`, or one tensor."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(effective(tensor).dtype, []).append(tensor)
    return [part for alike in kinds.values() for part in _parted(alike, env.get_default_bucket_size())]


def _parted(tensors: list[torch.Tensor], cap_bytes: int) -> list[list[torch.Tensor]]:
    """Cut a list into parts of at most `cap_bytes`, or of one tensor."""
    parts: list[list[torch.Tensor]] = []
    num_bytes = cap_bytes
    for tensor in tensors:
        num_bytes += effective(tensor).nbytes
        if num_bytes > cap_bytes:
            parts.append([])
            num_bytes = effective(tensor).nbytes
        parts[-1].append(tensor)
    return parts
