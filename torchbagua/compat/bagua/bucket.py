"""Bagua's buckets: Bagua tensors that are communicated together, with their operations."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

import torchbagua as tb
from torchbagua.compat.bagua.interfaces import Impl
from torchbagua.compat.bagua.node_mean import is_single_node
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade
from torchbagua.compat.bagua.tensor import effective, proxy_of, replace_effective


class DecentralizedOp:
    """The operation that `BaguaBucket.append_decentralized_synchronous_op` returns."""

    def __init__(self, peer_weight: torch.Tensor) -> None:
        self._peer_weight = peer_weight

    def copy_back_peer_weight(self, bucket: "BucketFacade") -> None:
        """Replace the effective tensors of the bucket with the mean with the peers, after it was computed."""
        bucket.write(self._peer_weight)


class BucketFacade:
    """Bagua's BaguaBucket: Bagua tensors that are communicated together. `AlgorithmImpl.tensors_to_buckets`
    creates them.

    Each wraps a `torchbagua.extend.BaguaBucket`, which runs the operations.

    Args:
        tensors: Bagua tensors of one dtype, on one device.
        name: a name that is unique among the buckets of the module.
        flatten: place the effective tensors one after the other in memory; if False, they are copied in each run.
        alignment: zeros pad the bucket to a multiple of this number of elements.

    Attributes:
        tensors: the tensors.
        name: the name.
        flatten: whether the bucket is flattened.
        padding_tensor: the zeros, or None.

    Raises:
        ValueError: there are no tensors, or their modules, dtypes or devices differ.
        AttributeError: a tensor is not a Bagua tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        kinds = {(proxy_of(t).module_name, effective(t).dtype, effective(t).device) for t in tensors}
        if len(kinds) != 1:
            raise ValueError(
                "BaguaBucket: tensors must be at least one, all of one module, dtype and device, got "
                f"{sorted(map(str, kinds))}"
            )
        ((self.bagua_module_name, dtype, device),) = kinds
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self.padding_tensor: torch.Tensor | None = None
        # The memory layout of the tensors, without their values.
        likes = [tb.extend.BaguaTensor(proxy_of(t).name, effective(t).detach().to("meta")) for t in self.tensors]
        num_elements = sum(_num_reals(like.parameter) for like in likes)
        if padding := -num_elements % alignment:
            likes.append(
                tb.extend.BaguaTensor(f"bagua_padding_tensor_bucket_{name}", torch.empty(padding, device="meta"))
            )
        self._likes = likes
        flat = torch.zeros(num_elements + padding, dtype=dtype.to_real(), device=device)
        if padding:
            self.padding_tensor = flat[num_elements:]
        self._flat = flat
        self._core: tb.extend.BaguaBucket | None = None
        self._runner: Impl | None = None
        self._writes_back = False
        self._ready: set[int] = set()
        for tensor in self.tensors:
            proxy_of(tensor).enter(self)
        self.read()

    def bind(self, runner: Impl, group: tb.BaguaProcessGroup) -> tb.extend.BaguaBucket:
        """Have `runner` run the bucket over `group`; return the core's bucket, which contains the operations."""
        self._runner = runner
        self._core = tb.extend.BaguaBucket(f"bucket {self.name}", self._likes, group, self._flat)
        return self._core

    @property
    def core(self) -> tb.extend.BaguaBucket:
        """The core's bucket. Raises RuntimeError before `bind`."""
        if self._core is None:
            raise RuntimeError(
                f"torchbagua.compat.bagua: bucket {self.name} has no algorithm yet: append operations in "
                "init_operations"
            )
        return self._core

    @property
    def backend_bucket(self) -> "BucketFacade":
        """The bucket itself: Bagua's backend has separate buckets, but this package does not."""
        return self

    @property
    def backend_tensor(self) -> torch.Tensor | None:
        """The flat tensor, if the bucket is flattened."""
        return self._flat if self.flatten else None

    def bytes(self) -> int:
        """Return the size of the effective tensors in bytes."""
        return sum(effective(tensor).nbytes for tensor in self.tensors)

    def flattened_tensor(self) -> torch.Tensor:
        """Return a new flat tensor with the effective tensors and the padding."""
        flat = torch.zeros_like(self._flat)
        for tensor, part in self._views(flat):
            part.copy_(effective(tensor).detach())
        return flat

    def check_flatten(self) -> bool:
        """Return whether the effective tensors are contiguous in memory, one after the other."""
        return all(effective(tensor).data_ptr() == part.data_ptr() for tensor, part in self._views(self._flat))

    def clear_ops(self) -> "BucketFacade":
        """Remove all operations."""
        self.core.clear_ops()
        self._writes_back = False
        return self

    def append_python_op(
        self, python_function: Callable[[str], None], group: ProcessGroupFacade | None = None
    ) -> "BucketFacade":
        """Append a function of the bucket's name. It changes the effective tensors in place.

        It runs concurrently with training, on a thread that runs all operations in order.
        """

        @wraps(python_function)
        def run(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
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
        """Append the mean or sum over all ranks; see `torchbagua.extend.BaguaBucket`. `scattergather` has no effect."""
        method = "append_centralized_synchronous_op"
        return self._append(method, hierarchical, average, compression, group=group)

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: ProcessGroupFacade | None = None,
    ) -> DecentralizedOp:
        """Append the mean with this rank's peers, in `peer_weight`; see `torchbagua.extend.BaguaBucket`.

        Args:
            peer_weight: a tensor from `flattened_tensor`.
            hierarchical: in multi-node training, average within each node first.
            peer_selection_mode: "all" or "shift_one".
            group: the group; by default the group of the algorithm.

        Returns:
            an object with a method `copy_back_peer_weight(bucket)`, which writes the mean into the effective tensors.
        """
        writes_back, mean = self._writes_back, effective(peer_weight)
        self._append("append_decentralized_synchronous_op", mean, hierarchical, peer_selection_mode, group=group)
        self._writes_back = writes_back  # the operation does not change the tensors
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
        """Append one round of the ring of compressed differences; see `torchbagua.extend.BaguaBucket`.

        The three replicas are tensors from `flattened_tensor`. As in Bagua, with `hierarchical` on a single node, the
        operation is the mean in full precision, and does not change the replicas.
        """
        if hierarchical and is_single_node(self._core_group(group)):
            return self._append("append_centralized_synchronous_op", group=group)
        replicas = [effective(replica) for replica in (weight, left_peer_weight, right_peer_weight)]
        method = "append_low_precision_decentralized_synchronous_op"
        return self._append(method, *replicas, hierarchical, compression, group=group)

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: ProcessGroupFacade | None = None
    ) -> "BucketFacade":
        """Append the mean over all ranks, for a round concurrent with training; see `torchbagua.extend.BaguaBucket`.

        In Bagua, the returned operation can lock weights. This package's asynchronous averaging needs no lock, so this
        method returns none; see `torchbagua.AsyncModelAverageAlgorithm`.
        """
        return self._append("append_asynchronous_model_average_op", peer_selection_mode, group=group)

    def _append(self, method: str, *arguments: Any, group: ProcessGroupFacade | None) -> "BucketFacade":
        bucket = self.core
        getattr(bucket, method)(*arguments, group=self._core_group(group))
        self._writes_back = True
        return self

    def _core_group(self, group: ProcessGroupFacade | None) -> tb.BaguaProcessGroup:
        """Return the private groups for `group`, by default the private groups of the algorithm."""
        assert self._runner is not None
        return self._runner.open_group(group, self.core.flat.device) or self.core.group

    def mark_ready(self, tensor: torch.Tensor) -> None:
        """Record that the effective tensor of a tensor of the bucket is final."""
        if self._runner is None:
            raise RuntimeError(f"torchbagua.compat.bagua: no algorithm runs bucket {self.name} yet")
        if id(tensor) in self._ready:
            raise RuntimeError(
                f"torchbagua.compat.bagua: {proxy_of(tensor).name} was marked ready twice, but bucket {self.name} has "
                f"not run in between: {self.missing()}"
            )
        self._ready.add(id(tensor))
        self._runner.run_ready()

    def missing(self) -> str:
        """Return text that names the tensors that are not ready."""
        names = [proxy_of(tensor).name for tensor in self.tensors if id(tensor) not in self._ready]
        return f"{', '.join(names) or 'none'} of its tensors {'is' if len(names) < 2 else 'are'} not ready"

    @property
    def is_ready(self) -> bool:
        """Whether all effective tensors are final."""
        return len(self._ready) == len(self.tensors)

    @property
    def has_ready_tensor(self) -> bool:
        """Whether any tensor is final."""
        return bool(self._ready)

    def begin(self) -> None:
        """Prepare for a run: mark all tensors as not ready, and copy their values into the flat tensor."""
        self._ready.clear()
        self.read()

    def end(self) -> None:
        """Copy the results of the run from the flat tensor into the effective tensors."""
        if self._writes_back and not self.flatten:
            self.write(self._flat)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the effective tensors into the flat tensor; if the bucket is flattened, make them views of it."""
        for tensor, part in self._views(self._flat):
            found = effective(tensor)
            if found.data_ptr() != part.data_ptr() or found.stride() != part.stride():
                part.copy_(found)
                if self.flatten:
                    replace_effective(tensor, part)

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Copy a tensor with the layout of the flat tensor into the effective tensors."""
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
    """Return the number of elements that `tensor` takes in a flat tensor: a complex number takes two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
