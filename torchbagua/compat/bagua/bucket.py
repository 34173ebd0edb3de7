"""Bagua's buckets: Bagua tensors that are communicated together, and the operations that do it."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

import torchbagua as tb
from torchbagua.compat.bagua.node_mean import is_single_node
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade
from torchbagua.compat.bagua.tensor import effective, proxy_of, replace_effective

if TYPE_CHECKING:
    from torchbagua.compat.bagua.own_algorithm import OwnImpl


class DecentralizedOp:
    """What `BaguaBucket.append_decentralized_synchronous_op` returns."""

    def __init__(self, peer_weight: torch.Tensor) -> None:
        self._peer_weight = peer_weight

    def copy_back_peer_weight(self, bucket: "BucketFacade") -> None:
        """Replace what the tensors of the bucket stand for by the mean with the peers, once it is there."""
        bucket.write(self._peer_weight)


class BucketFacade:
    """Bagua's BaguaBucket: Bagua tensors that are communicated together. `AlgorithmImpl.tensors_to_buckets` makes them.

    A `torchbagua.BaguaBucket` runs its operations.

    Args:
        tensors: Bagua tensors of one dtype, on one device.
        name: a name that no other bucket of the module has.
        flatten: have what they stand for lie one after the other in memory. Else it is copied each time.
        alignment: zeros are added until the number of elements is a multiple of this.

    Attributes:
        tensors: the tensors.
        name: the name.
        flatten: whether they were flattened.
        padding_tensor: the zeros, or None.

    Raises:
        ValueError: there are no tensors, or they are of several modules, dtypes or devices.
        AttributeError: one is no Bagua tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        kinds = {(proxy_of(one).module_name, effective(one).dtype, effective(one).device) for one in tensors}
        if len(kinds) != 1:
            raise ValueError(
                f"BaguaBucket: tensors must be some, of one module, dtype and device, got {sorted(map(str, kinds))}"
            )
        ((self.bagua_module_name, dtype, device),) = kinds
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self.padding_tensor: torch.Tensor | None = None
        # As they are laid out, without their values.
        likes = [tb.BaguaTensor(proxy_of(one).name, effective(one).detach().to("meta")) for one in self.tensors]
        num_elements = sum(_num_reals(like.parameter) for like in likes)
        if padding := -num_elements % alignment:
            likes.append(tb.BaguaTensor(f"bagua_padding_tensor_bucket_{name}", torch.empty(padding, device="meta")))
        self._likes = likes
        flat = torch.zeros(num_elements + padding, dtype=dtype.to_real(), device=device)
        if padding:
            self.padding_tensor = flat[num_elements:]
        self._flat = flat
        self._core: tb.BaguaBucket | None = None
        self._runner: OwnImpl | None = None
        self._writes_back = False
        self._ready: set[int] = set()
        for tensor in self.tensors:
            proxy_of(tensor).bucket = self
        self.read()

    def bind(self, runner: "OwnImpl", group: tb.BaguaProcessGroup) -> tb.BaguaBucket:
        """Have `runner` run the bucket over `group`; return the core's bucket, which has the operations."""
        self._runner = runner
        self._core = tb.BaguaBucket(f"bucket {self.name}", self._likes, group, self._flat)
        return self._core

    @property
    def core(self) -> tb.BaguaBucket:
        """The core's bucket. Raises RuntimeError before there is one."""
        if self._core is None:
            raise RuntimeError(
                f"torchbagua.compat.bagua: bucket {self.name} has no algorithm yet: append operations in "
                "init_operations"
            )
        return self._core

    @property
    def backend_bucket(self) -> "BucketFacade":
        """The bucket itself: Bagua's backend has buckets of its own, and this package has not."""
        return self

    @property
    def backend_tensor(self) -> torch.Tensor | None:
        """The flat tensor, if the bucket is flattened."""
        return self._flat if self.flatten else None

    def bytes(self) -> int:
        """Return the bytes of what the tensors stand for."""
        return sum(effective(tensor).nbytes for tensor in self.tensors)

    def flattened_tensor(self) -> torch.Tensor:
        """Return what the tensors stand for, and the padding, in a new flat tensor."""
        flat = torch.zeros_like(self._flat)
        for tensor, part in self._views(flat):
            part.copy_(effective(tensor).detach())
        return flat

    def check_flatten(self) -> bool:
        """Return whether what the tensors stand for lies one after the other in memory."""
        return all(effective(tensor).data_ptr() == part.data_ptr() for tensor, part in self._views(self._flat))

    def clear_ops(self) -> "BucketFacade":
        """Remove all operations."""
        self.core.clear_ops()
        self._writes_back = False
        return self

    def append_python_op(
        self, python_function: Callable[[str], None], group: ProcessGroupFacade | None = None
    ) -> "BucketFacade":
        """Append a function of the name of the bucket. It changes what the tensors stand for, in place.

        It runs beside training, on a thread that runs all operations in their order.
        """

        @wraps(python_function)
        def run(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            if not self.flatten:
                self.write(bucket.flat)
            python_function(self.name)
            if not self.flatten:
                self.read()

        return self._append("append_python_op", run, group=group)

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: ProcessGroupFacade | None = None,
    ) -> "BucketFacade":
        """Append the mean, or sum, over all ranks; see `torchbagua.BaguaBucket`."""
        method = "append_centralized_synchronous_op"
        return self._append(method, hierarchical, average, scattergather, compression, group=group)

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: ProcessGroupFacade | None = None,
    ) -> DecentralizedOp:
        """Append the mean with this rank's peers, in `peer_weight`; see `torchbagua.BaguaBucket`.

        Args:
            peer_weight: as `flattened_tensor` returns it.
            hierarchical: with several nodes of several ranks: within the node first.
            peer_selection_mode: "all" or "shift_one".
            group: the group; by default that of the algorithm.

        Returns:
            an object whose `copy_back_peer_weight(bucket)` writes the mean into the tensors.
        """
        writes_back, mean = self._writes_back, effective(peer_weight)
        self._append("append_decentralized_synchronous_op", mean, hierarchical, peer_selection_mode, group=group)
        self._writes_back = writes_back  # the tensors stay as they are
        return DecentralizedOp(mean)

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: ProcessGroupFacade | None = None,
    ) -> "BucketFacade":
        """Append one round of the ring of compressed differences; see `torchbagua.BaguaBucket`.

        The three replicas are as `flattened_tensor` returns it. As in Bagua, on a single node, if `hierarchical`, it is
        the mean in full precision, and the replicas stay as they are.
        """
        if hierarchical and is_single_node(self._core_group(group)):
            return self._append("append_centralized_synchronous_op", group=group)
        replicas = [effective(replica) for replica in (weight, left_peer_weight, right_peer_weight)]
        method = "append_low_precision_decentralized_synchronous_op"
        return self._append(method, *replicas, hierarchical, compression, group=group)

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: ProcessGroupFacade | None = None
    ) -> "BucketFacade":
        """Append the mean over all ranks, for a round that runs beside training; see `torchbagua.BaguaBucket`.

        What Bagua's method returns can lock weights. This package's asynchronous averaging needs no lock, see
        `torchbagua.AsyncModelAverageAlgorithm`, and there is none here.
        """
        return self._append("append_asynchronous_model_average_op", peer_selection_mode, group=group)

    def _append(self, method: str, *arguments: Any, group: ProcessGroupFacade | None) -> "BucketFacade":
        bucket = self.core
        getattr(bucket, method)(*arguments, group=self._core_group(group))
        self._writes_back = True
        return self

    def _core_group(self, group: ProcessGroupFacade | None) -> tb.BaguaProcessGroup:
        """Return the private groups for `group`, by default those of the algorithm."""
        assert self._runner is not None
        return self._runner.open_group(group, self.core.flat.device) or self.core.group

    def mark_ready(self, tensor: torch.Tensor) -> None:
        """Take note that what a tensor of the bucket stands for is final."""
        if self._runner is None:
            raise RuntimeError(f"torchbagua.compat.bagua: bucket {self.name} has no algorithm yet, which could run it")
        if id(tensor) in self._ready:
            raise RuntimeError(
                f"torchbagua.compat.bagua: {proxy_of(tensor).name} was marked ready twice, and bucket {self.name} has "
                f"not run in between: {self.missing()}"
            )
        self._ready.add(id(tensor))
        self._runner.run_ready()

    def missing(self) -> str:
        """Say which tensors are not ready."""
        names = [proxy_of(tensor).name for tensor in self.tensors if id(tensor) not in self._ready]
        return f"{', '.join(names) or 'none'} of its tensors {'is' if len(names) < 2 else 'are'} not ready"

    @property
    def is_ready(self) -> bool:
        """Whether all tensors are final."""
        return len(self._ready) == len(self.tensors)

    @property
    def is_begun(self) -> bool:
        """Whether some tensor is."""
        return bool(self._ready)

    def begin(self) -> None:
        """Prepare for a run: no tensor is ready any more, and the flat tensor has their values."""
        self._ready.clear()
        self.read()

    def end(self) -> None:
        """Have the tensors stand for what the run has made of the flat tensor."""
        if self._writes_back and not self.flatten:
            self.write(self._flat)

    @torch.no_grad()
    def read(self) -> None:
        """Copy what the tensors stand for into the flat tensor, and have it lie there if the bucket is flattened."""
        for tensor, part in self._views(self._flat):
            found = effective(tensor)
            if found.data_ptr() != part.data_ptr() or found.stride() != part.stride():
                part.copy_(found)
                if self.flatten:
                    replace_effective(tensor, part)

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Copy a tensor like the flat one into what the tensors stand for."""
        for tensor, part in self._views(flat):
            effective(tensor).copy_(part)

    def _views(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = flat.split([_num_reals(like.parameter) for like in self._likes])
        return [
            (tensor, like.order.shape(part))
            for tensor, like, part in zip(self.tensors, self._likes, parts, strict=False)  # padding has no tensor
        ]


BaguaBucket = BucketFacade


def _num_reals(tensor: torch.Tensor) -> int:
    """Return how many elements of a flat tensor it takes: a complex number is two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
