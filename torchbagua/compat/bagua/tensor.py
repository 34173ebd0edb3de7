"""Bagua tensors: torch tensors that stand for what is communicated, itself or its gradient, say.

Importing `torchbagua.compat.bagua` gives every torch.Tensor the methods of `BaguaTensor`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchbagua.compat.bagua.bucket import BucketFacade

Getter = Callable[[torch.Tensor], torch.Tensor]
Setter = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Proxy:
    """What a Bagua tensor knows beside its values. A copy or a file of the tensor does not keep it.

    Attributes:
        name: of the tensor.
        module_name: of the module that it belongs to.
        getter: returns what is communicated, the effective tensor.
        setter: puts another tensor in its place.
        bucket: that the tensor is in.
    """

    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    bucket: "BucketFacade | None" = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def proxy_of(tensor: torch.Tensor) -> Proxy:
    """Return what a Bagua tensor knows. Raises AttributeError for one that is none."""
    proxy = getattr(tensor, "_bagua_proxy", None)
    if proxy is None:
        raise AttributeError(
            f"torchbagua.compat.bagua: a tensor of shape {list(tensor.shape)} is no Bagua tensor: call "
            "ensure_bagua_tensor first"
        )
    assert isinstance(proxy, Proxy)
    return proxy


def effective(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor stands for; one that is no Bagua tensor stands for itself.

    Raises:
        RuntimeError: there is nothing that it stands for, no gradient, say.
    """
    proxy: Proxy | None = getattr(tensor, "_bagua_proxy", None)
    if proxy is None or proxy.getter is None:
        return tensor
    found = proxy.getter(tensor)
    if not isinstance(found, torch.Tensor):
        raise RuntimeError(
            f"torchbagua.compat.bagua: the getter_closure of {proxy.name} must return a tensor, got {found!r}; has it "
            "a gradient?"
        )
    return found


def replace_effective(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Have what a Bagua tensor stands for lie in the memory of `view`, which is of its shape."""
    proxy = proxy_of(tensor)
    with torch.no_grad():
        if proxy.setter is not None:
            proxy.setter(tensor, view)
        else:
            effective(tensor).set_(view)  # type: ignore[call-overload]


class TensorFacade:
    """Bagua's BaguaTensor: the methods that importing `torchbagua.compat.bagua` gives to torch.Tensor."""

    @property
    def bagua_tensor_name(self: Any) -> str:
        """The name that `ensure_bagua_tensor` was given."""
        return proxy_of(self).name

    @property
    def bagua_module_name(self: Any) -> str | None:
        """The name of the module that `ensure_bagua_tensor` was given."""
        return proxy_of(self).module_name

    def is_bagua_tensor(self: Any) -> bool:
        """Return whether it is a Bagua tensor."""
        return getattr(self, "_bagua_proxy", None) is not None

    def ensure_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Make the tensor a Bagua tensor, and return it. A second call replaces what the first has said.

        Args:
            name: a name that no other tensor of the module has.
            module_name: the name of the module, `bagua_ddp.bagua_module_name`.
            getter_closure: returns what the tensor stands for, given the tensor; by default itself.
            setter_closure: puts another tensor, its second argument, in the place of that.

        Raises:
            ValueError: there is a setter and no getter.
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
        """Return a Bagua tensor in the same memory; this one stays as it is. See `ensure_bagua_tensor`."""
        view = self.view(self.dtype)
        return TensorFacade.ensure_bagua_tensor(view, name, module_name, getter_closure, setter_closure)

    def bagua_getter_closure(self: Any) -> torch.Tensor:
        """Return what the tensor stands for."""
        return effective(self)

    def bagua_setter_closure(self: Any, tensor: torch.Tensor) -> None:
        """Put `tensor` in the place of what the tensor stands for.

        Raises:
            TypeError: it has no setter.
        """
        setter = proxy_of(self).setter
        if setter is None:
            raise TypeError(f"torchbagua.compat.bagua: {proxy_of(self).name} has no setter_closure")
        setter(self, tensor)

    def bagua_backend_tensor(self: Any) -> torch.Tensor:
        """Return what the tensor stands for: Bagua's backend has tensors of its own, and this package has not."""
        return effective(self)

    def bagua_ensure_grad(self: Any) -> torch.Tensor:
        """Give a parameter a gradient of zeros if it has none, and return the parameter."""
        if self.grad is None:
            self.grad = torch.zeros_like(self)
        own: torch.Tensor = self
        return own

    def bagua_mark_communication_ready(self: Any) -> None:
        """Say that what the tensor stands for is final. A bucket runs when all of its tensors, and all buckets before
        it, are ready.

        Raises:
            RuntimeError: the tensor is in no bucket, or was marked before, and its bucket has not run since.
        """
        bucket = proxy_of(self).bucket
        if bucket is None:
            raise RuntimeError(f"torchbagua.compat.bagua: {proxy_of(self).name} is in no bucket, which could run")
        bucket.mark_ready(self)

    def bagua_mark_communication_ready_without_synchronization(self: Any) -> None:
        """Do what `bagua_mark_communication_ready` does."""
        TensorFacade.bagua_mark_communication_ready(self)

    def bagua_set_storage(self: Any, storage: torch.UntypedStorage, storage_offset: int = 0) -> None:
        """Have what the tensor stands for lie in `storage`, from that element on."""
        found = effective(self)
        view = torch.empty(0, dtype=found.dtype, device=found.device)
        view.set_(storage, storage_offset, found.shape)  # type: ignore[call-overload]
        replace_effective(self, view)


BaguaTensor = TensorFacade


def install() -> None:
    """Give torch.Tensor the methods."""
    for name, member in vars(TensorFacade).items():
        if "bagua" in name:
            setattr(torch.Tensor, name, member)
