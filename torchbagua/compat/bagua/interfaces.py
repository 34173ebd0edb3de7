"""What Bagua's facades use of each other, as types, so that none of their modules imports a module that imports it."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

import torchbagua as tb


class Bucket(Protocol):
    """A bucket, as its tensors use it."""

    def mark_ready(self, tensor: torch.Tensor) -> None: ...


class Impl(Protocol):
    """The impl of a user's algorithm, as its buckets use it."""

    def open_group(self, group: Any, device: torch.device) -> tb.BaguaProcessGroup | None: ...

    def run_ready(self) -> None: ...


class Ddp(Protocol):
    """Bagua's DistributedDataParallel, as a user's algorithm and its impl use it."""

    module: torch.nn.Module
    process_group: Any
    parameters_to_ignore: Any
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    require_backward_grad_sync: bool
    bagua_module_name: str
    bagua_train_step_counter: int

    def use_own_impl(self, impl: Any) -> None: ...

    def ignore(self, names: Iterable[str]) -> None: ...

    def count_forward(self) -> None: ...

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def broadcast_from_first_rank(self) -> None: ...

    def wait_pending_comm_ops(self) -> Any: ...
