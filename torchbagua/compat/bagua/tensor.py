"""Bagua tensors: torch tensors that stand for the tensor to communicate: themselves, or their gradient, for example.

The tensor to communicate is called the effective tensor. Importing `torchbagua.compat.bagua` adds the methods of
`BaguaTensor` to torch.Tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.compat.bagua.interfaces import Bucket

Getter = Callable[[torch.Tensor], torch.Tensor]
Setter = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Proxy:
    """The data of a Bagua tensor besides its values. Copies and files of the tensor do not contain it.

    Attributes:
        name: the name of the tensor.
        module_name: the name of the module that it belongs to.
        getter: returns the effective tensor.
        setter: replaces the effective tensor with another tensor.
        bucket: the bucket that contains the tensor.
    """

    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    bucket: Bucket | None = None

    def enter(self, bucket: Bucket) -> None:
        """Note that the bucket contains the tensor."""
        self.bucket = bucket

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def proxy_of(tensor: torch.Tensor) -> Proxy:
    """Return the proxy of a Bagua tensor. Raises AttributeError for any other tensor."""
    proxy = getattr(tensor, "_bagua_proxy", None)
    if proxy is None:
        raise AttributeError(
            f"torchbagua.compat.bagua: a tensor of shape {list(tensor.shape)} is not a Bagua tensor; call "
            "ensure_bagua_tensor first"
        )
    assert isinstance(proxy, Proxy)
    return proxy


def remove_proxy(tensor: Any) -> None:
    """Make a Bagua tensor an ordinary tensor again."""
    tensor._bagua_proxy = None


def effective(tensor: torch.Tensor) -> torch.Tensor:
    """Return the effective tensor; a tensor that is not a Bagua tensor is its own effective tensor.

    Raises:
        RuntimeError: the effective tensor does not exist, because there is no gradient, for example.
    """
    proxy: Proxy | None = getattr(tensor, "_bagua_proxy", None)
    if proxy is None or proxy.getter is None:
        return tensor
    found = proxy.getter(tensor)
    if not isinstance(found, torch.Tensor):
        raise RuntimeError(
            f"torchbagua.compat.bagua: the getter_closure of {proxy.name} must return a tensor, got {found!r}; does "
            "it have a gradient?"
        )
    return found


def replace_effective(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Make the effective tensor of a Bagua tensor use the memory of `view`, a tensor of the same shape."""
    proxy = proxy_of(tensor)
    with torch.no_grad():
        if proxy.setter is not None:
            proxy.setter(tensor, view)
        else:
            effective(tensor).set_(view)  # type: ignore[call-overload]


class TensorFacade:
    """Bagua's BaguaTensor: the methods that importing `torchbagua.compat.bagua` adds to torch.Tensor."""

    @property
    def bagua_tensor_name(self: Any) -> str:
        """The name passed to `ensure_bagua_tensor`."""
        return proxy_of(self).name

    @property
    def bagua_module_name(self: Any) -> str | None:
        """The name of the module passed to `ensure_bagua_tensor`."""
        return proxy_of(self).module_name

    def is_bagua_tensor(self: Any) -> bool:
        """Return whether this is a Bagua tensor."""
        return getattr(self, "_bagua_proxy", None) is not None

    def ensure_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Make the tensor a Bagua tensor, and return it. A second call replaces the arguments of the first.

        Args:
            name: a name that is unique among the tensors of the module.
            module_name: the name of the module, `bagua_ddp.bagua_module_name`.
            getter_closure: a function of the tensor that returns the effective tensor; by default the tensor itself.
            setter_closure: a function of the tensor and of another tensor that replaces the effective tensor with it.

        Raises:
            ValueError: there is a setter, but no getter.
        """
        if setter_closure is not None and getter_closure is None:
            raise ValueError("ensure_bagua_tensor: setter_closure needs a getter_closure")
        self._bagua_proxy = Proxy(name or "", module_name, getter_closure, setter_closure)
        own: torch.Tensor = self
        return own

    def to_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Return a Bagua tensor in the same memory; this tensor does not change. See `ensure_bagua_tensor`."""
        view = self.view(self.dtype)
        return TensorFacade.ensure_bagua_tensor(view, name, module_name, getter_closure, setter_closure)

    def bagua_getter_closure(self: Any) -> torch.Tensor:
        """Return the effective tensor."""
        return effective(self)

    def bagua_setter_closure(self: Any, tensor: torch.Tensor) -> None:
        """Replace the effective tensor with `tensor`.

        Raises:
            TypeError: the tensor has no setter.
        """
        setter = proxy_of(self).setter
        if setter is None:
            raise TypeError(f"torchbagua.compat.bagua: {proxy_of(self).name} has no setter_closure")
        setter(self, tensor)

    def bagua_backend_tensor(self: Any) -> torch.Tensor:
        """Return the effective tensor: Bagua's backend has separate tensors, but this package does not."""
        return effective(self)

    def bagua_ensure_grad(self: Any) -> torch.Tensor:
        """Give a parameter a gradient of zeros if it has none, and return the parameter."""
        if self.grad is None:
            self.grad = torch.zeros_like(self)
        own: torch.Tensor = self
        return own

    def bagua_mark_communication_ready(self: Any) -> None:
        """Mark the effective tensor as final. A bucket runs when all of its tensors, and all buckets before it, are
        ready.

        Raises:
            RuntimeError: the tensor is in no bucket, or was already marked, and its bucket has not run since.
        """
        bucket = proxy_of(self).bucket
        if bucket is None:
            raise RuntimeError(
                f"torchbagua.compat.bagua: {proxy_of(self).name} is in no bucket; return it in a bucket from "
                "tensors_to_buckets"
            )
        bucket.mark_ready(self)

    def bagua_mark_communication_ready_without_synchronization(self: Any) -> None:
        """Call `bagua_mark_communication_ready`."""
        TensorFacade.bagua_mark_communication_ready(self)

    def bagua_set_storage(self: Any, storage: torch.UntypedStorage, storage_offset: int = 0) -> None:
        """Move the effective tensor into `storage`, starting at element `storage_offset`, without copying values."""
        found = effective(self)
        view = torch.empty(0, dtype=found.dtype, device=found.device)
        view.set_(storage, storage_offset, found.shape)  # type: ignore[call-overload]
        replace_effective(self, view)


BaguaTensor = TensorFacade


def install() -> None:
    """Add the methods to torch.Tensor."""
    for name, member in vars(TensorFacade).items():
        if "bagua" in name:
            setattr(torch.Tensor, name, member)
