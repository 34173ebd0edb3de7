"""Runs an algorithm that is written for Bagua's API with `attach`.

Such a custom algorithm has its own buckets, with any effective tensors. So `attach` treats it as a weight algorithm:
DDP sends nothing, and the lane runs the buckets.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

import torchbagua as tb
from torchbagua.compat.bagua import env
from torchbagua.compat.bagua.algorithms.base import ImplFacade
from torchbagua.compat.bagua.bucket import BucketFacade
from torchbagua.compat.bagua.interfaces import Ddp
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade
from torchbagua.compat.bagua.tensor import TensorFacade, effective, proxy_of, remove_proxy

_PLAIN_TYPES = (bool, int, float, str, type(None))


def is_own(algorithm: object) -> bool:
    """Return whether an algorithm is written for Bagua's API: it overrides `reify`."""
    return isinstance(algorithm, tb.Algorithm) and type(algorithm).reify is not tb.Algorithm.reify


@dataclass(frozen=True)
class OwnAlgorithm(tb.Algorithm):
    """A user's algorithm, and the module that it is attached to."""

    averages_weights: ClassVar[bool] = True

    algorithm: tb.Algorithm
    bagua_ddp: Ddp = field(repr=False)

    def arguments(self) -> dict[str, str]:
        """Return the name of the class, and its attributes of plain types."""
        own = {name: repr(value) for name, value in vars(self.algorithm).items() if isinstance(value, _PLAIN_TYPES)}
        return {"algorithm": type(self.algorithm).__qualname__, **own}

    def make_impl(self, runner: tb.extend.WeightRunner) -> "OwnImpl":
        """Return the impl that runs the result of the user's `reify`."""
        impl: Any = self.algorithm.reify(self.bagua_ddp.process_group)
        if not isinstance(impl, ImplFacade):
            raise TypeError(
                f"{type(self.algorithm).__name__}.reify must return an AlgorithmImpl of torchbagua.compat.bagua, got "
                f"{impl!r}; an algorithm with one of torchbagua's impls overrides make_impl instead"
            )
        return OwnImpl(runner, impl)


class OwnImpl(tb.extend.WeightImpl):
    """Runs a user's AlgorithmImpl.

    Buckets run in the same order on all ranks. A bucket starts when its tensors are ready, and all buckets before it
    have started.
    """

    algorithm: OwnAlgorithm

    def __init__(self, runner: tb.extend.WeightRunner, impl: ImplFacade) -> None:
        super().__init__(runner)
        self.own = impl
        self.own_buckets: list[BucketFacade] = []
        self.ddp = self.algorithm.bagua_ddp
        self.ddp.use_own_impl(self)
        self._are_weights = False
        self._num_steps = 0
        runner.use_names(name=type(impl).__name__)
        self._weights = runner.average(
            tb.extend.WeightBuckets(runner, lambda: {"optimizer steps": self._num_steps}),
            agree_on_overflow=self._agree_on_overflow,
            requires_scaler=False,
            replicas_diverge=lambda: self._are_weights and runner.process_group.size > 1,
        )
        runner.on_close(self._forget_tensors)
        self._facades: dict[tb.extend.BaguaBucket, BucketFacade] = {}
        self._order: deque[BucketFacade] = deque()
        self._running: list[tuple[BucketFacade, Any]] = []
        self._groups: list[tuple[ProcessGroupFacade, tb.BaguaProcessGroup]] = []
        self._reached: set[str] = set()  # the parameters with a gradient computed in this backward
        self._on_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None

    def init_tensors(self, module: torch.nn.Module) -> list[tb.extend.BaguaTensor]:
        self.ddp.ignore(self.runner.ignored_names)
        tensors = self.own.init_tensors(self.ddp)
        parameters = {id(parameter) for parameter in module.parameters()}
        self._are_weights = any(id(effective(tensor)) in parameters for tensor in tensors)
        return [tb.extend.BaguaTensor(proxy_of(tensor).name, tensor) for tensor in tensors]

    def tensors_to_buckets(self, tensors: list[tb.extend.BaguaTensor], do_flatten: bool) -> list[tb.extend.BaguaBucket]:
        suggested = _suggest_buckets([tensor.parameter for tensor in tensors])
        self.own_buckets = self.own.tensors_to_buckets(suggested, self.ddp.gradient_as_bucket_view)
        self._facades = {facade.bind(self, self.runner.process_group): facade for facade in self.own_buckets}
        self._order = deque(self.own_buckets)
        return list(self._facades)

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        self.own.init_operations(self.ddp, self._facades[bucket])

    def reset(self) -> None:
        self.wait_pending()
        super().reset()
        self._on_step = self.own.init_post_optimizer_step_hook(self.ddp)

    def need_reset(self) -> bool:
        """Return False: the user's `need_reset` is called before each forward instead."""
        return False

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: Bagua's API has no notification of loaded weights."""

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None]:
        return self._before_forward

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None]:
        return self._on_gradient

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._after_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> None:
        """Return None, no hook after a training step: the user's hook is called after each step of each optimizer."""
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
        """Run the ready buckets at the front of the order."""
        while self._order[0].is_ready:
            first = self._order[0]
            self._order.rotate(-1)
            first.begin()
            self._running.append((first, self.runner.lane.submit(first.core.run)))

    def wait_pending(self) -> None:
        """Wait for the running buckets, and write the results into their effective tensors."""
        while self._running:
            bucket, job = self._running.pop(0)
            job.finish()
            bucket.end()

    def open_group(self, group: ProcessGroupFacade | None, device: torch.device) -> tb.BaguaProcessGroup | None:
        """Return the private groups for a group, or None for the group of the algorithm. Collective."""
        if group is None or group.torch_group is self.runner.process_group.process_group:
            return None
        for known, opened in self._groups:
            if known.torch_group is group.torch_group:
                return opened
        opened = group.open()
        self._groups.append((group, opened))
        opened.open()
        opened.launch_on_lane()
        opened.private.use_device(device)
        return opened

    def finish(self) -> bool:
        """Apply the last mean if weights were communicated."""
        self.wait_pending()
        if self.runner.replicas_diverge():
            self._select_weights()
            self._weights.means.take()
        return self._are_weights

    def _forget_tensors(self) -> None:
        for _, opened in self._groups:
            opened.close()
        for bucket in self.own_buckets:
            for tensor in bucket.tensors:
                remove_proxy(tensor)

    def _select_weights(self) -> None:
        self._weights.make_buckets(self._weights.select(self.ddp.module, self.runner.ignored_names))

    def _before_forward(self, inputs: Any) -> None:
        self._reached.clear()
        self.ddp.count_forward()
        if self.own.need_reset():
            self.wait_pending()
            self.ddp.broadcast_from_first_rank()  # the algorithm may now rely on equal weights
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
        waiting = [bucket for bucket in self._order if bucket.has_ready_tensor]
        if waiting and not self._are_weights:
            raise RuntimeError(
                f"torchbagua.compat.bagua: backward has ended, but bucket {self._order[0].name} has not run: "
                f"{self._order[0].missing()}. If some backward passes do not use them, add their names to the "
                "module's _bagua_params_and_buffers_to_ignore, or use DistributedDataParallel with "
                "find_unused_parameters=True"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        if is_taken:
            self._num_steps += 1
            self._on_step(optimizer)


def _suggest_buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return lists of one dtype, with at most `env.get_default_bucket_size` bytes or a single larger tensor."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(effective(tensor).dtype, []).append(tensor)
    return [part for kind in kinds.values() for part in _split_by_bytes(kind, env.get_default_bucket_size())]


def _split_by_bytes(tensors: list[torch.Tensor], cap_bytes: int) -> list[list[torch.Tensor]]:
    """Split a list into parts of at most `cap_bytes`, or of a single larger tensor."""
    parts: list[list[torch.Tensor]] = []
    num_bytes = cap_bytes
    for tensor in tensors:
        num_bytes += effective(tensor).nbytes
        if num_bytes > cap_bytes:
            parts.append([])
            num_bytes = effective(tensor).nbytes
        parts[-1].append(tensor)
    return parts
