"""Bagua's base classes of custom algorithms, and its registry of names."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchbagua.algorithms import Algorithm, available_algorithms, get, register
from torchbagua.compat.bagua.bucket import BucketFacade
from torchbagua.compat.bagua.interfaces import Ddp
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade
from torchbagua.compat.bagua.tensor import TensorFacade, proxy_of

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"]


class ImplFacade:
    """Bagua's AlgorithmImpl: the running part of an algorithm that is written for Bagua's API.

    `Algorithm.reify` returns one. This class appends no operations, so it averages nothing: a subclass overrides
    `init_operations`, and every other method that it changes. By default gradients are communicated in the suggested
    buckets, each as soon as backward has computed its gradients.

    Args:
        process_group: the ranks that train together.
    """

    def __init__(self, process_group: ProcessGroupFacade) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Return True to initialize everything again. Called before each forward in training."""
        return False

    def init_tensors(self, bagua_ddp: Ddp) -> list[torch.Tensor]:
        """Return the Bagua tensors to communicate: by default the parameters, which stand for their gradients."""
        return [
            TensorFacade.ensure_bagua_tensor(
                TensorFacade.bagua_ensure_grad(parameter),
                name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda parameter: parameter.grad,  # type: ignore[arg-type,return-value]
                setter_closure=lambda parameter, gradient: setattr(parameter, "grad", gradient),
            )
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(self, tensors: list[list[torch.Tensor]], do_flatten: bool) -> list[BucketFacade]:
        """Return the buckets: by default one for each list of `tensors`.

        Args:
            tensors: the tensors from `init_tensors`, in the same order, as lists of one dtype and of up to 10 MiB.
            do_flatten: the argument of `with_bagua`.
        """
        return [BucketFacade(part, name=str(index), flatten=do_flatten) for index, part in enumerate(tensors)]

    def init_forward_pre_hook(self, bagua_ddp: Ddp) -> Callable[[Any], None]:
        """Return a function that is called before each forward in training, with the inputs of the module."""
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: Ddp) -> Callable[[str, torch.Tensor], None]:
        """Return a function of (name, parameter) that is called when the gradient of a parameter is accumulated.

        By default it marks the parameter ready.
        """

        def hook(name: str, parameter: torch.Tensor) -> None:
            if TensorFacade.is_bagua_tensor(parameter) and proxy_of(parameter).bucket is not None:
                TensorFacade.bagua_mark_communication_ready(parameter)

        return hook

    def init_post_backward_hook(self, bagua_ddp: Ddp) -> Callable[[], None]:
        """Return a function that is called at the end of each backward. By default it waits for launched buckets."""
        return bagua_ddp.wait_pending_comm_ops

    def init_post_optimizer_step_hook(self, bagua_ddp: Ddp) -> Callable[[torch.optim.Optimizer], None]:
        """Return a function that is called after each step of each optimizer, with this optimizer."""
        return lambda optimizer: None

    def init_operations(self, bagua_ddp: Ddp, bucket: BucketFacade) -> None:
        """Append to `bucket` the operations to run on it."""


AlgorithmImpl = ImplFacade


class _Registry:
    """The names of registered algorithms; see `torchbagua.extend.register`."""

    def register(self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
        """Register an algorithm by a name."""
        register(name, algorithm, description)

    def get(self, name: str) -> Callable[..., Algorithm]:
        """Return the constructor registered as `name`. Raises KeyError if there is none."""
        return get(name)

    def available_algorithms(self) -> list[str]:
        """Return the names of all registered algorithms."""
        return list(available_algorithms())

    def __iter__(self) -> Iterator[str]:
        return iter(available_algorithms())

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


GlobalAlgorithmRegistry = _Registry()
