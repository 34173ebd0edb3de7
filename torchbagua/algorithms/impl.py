"""AlgorithmImpl: what runs an algorithm. With Algorithm, the interface of the built-in ones and of users' own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.compressors import Compressor, Identity
from torchbagua.lane import Lane
from torchbagua.user_warning import warn_user


class AlgorithmImpl:
    """An algorithm bound to a group, with all of its changing state. Override what the algorithm needs.

    An impl that overrides `init_tensors` communicates weights in buckets of its own; any other communicates gradients
    in DDP's buckets, from a DDP communication hook.

    Args:
        process_group: owned by the impl, closed with it.

    Attributes:
        process_group: the group, with private communicators for the lane.
        lane: runs what the impl communicates.
        tracer: tells the group's observers what is done and when.
        buckets: a weight algorithm's buckets; empty for a gradient algorithm, which runs in DDP's.
        ignored_names: the module's parameters and buffers that DDP was told to ignore.
        grad_scaler: what `attach` was given.
        has_joined: whether this rank has run out of data, and takes part with gradients of zero until the others have
            too (`torch.distributed.algorithms.Join`).
        ends_in_order: whether all ranks are expected to close it, and NCCL's groups to be shut down and not broken off.
        compressor: how values of parameters are sent; an impl that compresses sets its own. See `codec_for`.

    Raises:
        TypeError: the class overrides `tensors_to_buckets` but not `init_tensors`.
    """

    compressor: Compressor = Identity()

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        cls = type(self)
        overrides_buckets = cls.tensors_to_buckets is not AlgorithmImpl.tensors_to_buckets
        if overrides_buckets and not self.owns_buckets:
            raise TypeError(
                f"{cls.__name__} overrides tensors_to_buckets without init_tensors: a gradient algorithm runs in DDP's "
                "buckets, and a weight algorithm overrides both"
            )
        self.process_group = process_group
        if self.owns_buckets:
            process_group.use_private_nccl()
        self.tracer = process_group.tracer
        self.lane = Lane(
            f"torchbagua lane of {cls.__name__}",
            on_failure=process_group.close,
            waiting=partial(process_group.tracer.span, "wait"),
            watch=process_group.watch,
        )
        self.buckets: list[BaguaBucket] = []
        self.ignored_names: frozenset[str] = frozenset()
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.has_joined = False
        self.ends_in_order = False
        self._gradient_buckets: dict[int, BaguaBucket] = {}
        self._names: Mapping[int, str] = {}
        self._module: torch.nn.Module | None = None
        self._told_dtypes: set[torch.dtype] = set()

    @property
    def owns_buckets(self) -> bool:
        """Whether this is a weight algorithm, with buckets of its own."""
        return type(self).init_tensors is not AlgorithmImpl.init_tensors

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether a loop that has a GradScaler must hand it to `attach`."""
        return False

    def need_reset(self) -> bool:
        """Return True to have buckets initialised again; asked at the first bucket of a backward, or at each step."""
        return False

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. Overridden by weight algorithms only."""
        raise TypeError(f"{type(self).__name__} is a gradient algorithm: DDP gives it its tensors")

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets. Overridden by weight algorithms only."""
        raise TypeError(f"{type(self).__name__} must override tensors_to_buckets as it overrides init_tensors")

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append to `bucket` the operations to run on it. `module` is None behind the plain DDP hook."""
        raise TypeError(f"{type(self).__name__} must override AlgorithmImpl.init_operations")

    def codec_for(self, bucket: BaguaBucket) -> Compressor:
        """Return `compressor`, or that of full precision where it does not encode the bucket's dtype."""
        return self.compressor if self.compressor.encodes(bucket.flat.dtype) else Identity()

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of `parameters` that travel in full precision because `compressor` does not encode them.

        Overridden by an algorithm that compresses some parameters only.
        """
        encodes = self.compressor.encodes
        return {name: parameter for name, parameter in parameters.items() if not encodes(parameter.dtype.to_real())}

    def tell_uncompressed(self, parameters: Mapping[str, torch.Tensor], *, strict: bool = False) -> None:
        """Tell which of `parameters` are `uncompressed`, in a RuntimeWarning; once of every dtype.

        Raises:
            ValueError: there are some, and `strict` is True.
        """
        found = {name: one for name, one in self.uncompressed(parameters).items() if one.dtype not in self._told_dtypes}
        if not found:
            return
        names, dtypes = list(found), {one.dtype for one in found.values()}
        self._told_dtypes |= dtypes
        message = (
            f"{type(self).__name__} sends {len(names)} of {len(parameters)} parameters in full precision, because "
            f"{self.compressor} does not encode {' or '.join(sorted(map(str, dtypes)))}: {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}, {sum(one.nbytes for one in found.values()):,} bytes each time they "
            "are sent"
        )
        if strict:
            raise ValueError(f"attach: strict=True, and {message}")
        warn_user(f"torchbagua: {message}")

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None] | None:
        """Return a function of the module's inputs to call before each forward in training, or None."""
        return None

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None] | None:
        """Return a function of (name, parameter) to call when a parameter's gradient is accumulated, or None."""
        return None

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None] | None:
        """Return a function to call when autograd has finished a backward, or None. DDP may not have finished then."""
        return None

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None] | None:
        """Return a function of the optimizer to call after each of its steps, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain tensors and numbers, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: `state` is not this algorithm's.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state to load, got the keys {sorted(state)}")

    def agree_on_overflow(self, found_inf: bool) -> bool:
        """Return whether GradScaler has to skip the step, where `found_inf` says it of this rank's gradients.

        Overridden where all ranks must skip together although their gradients are not averaged.
        """
        return found_inf

    def finish(self, *, failed: bool) -> bool:
        """End the work on the module, before `close`; return whether this made weights equal on all ranks.

        Args:
            failed: an exception ends it, and other ranks may not be at this point.
        """
        self.ends_in_order = not failed
        return False

    def close(self) -> None:
        """Finish what is queued, end the lane's thread, the private groups and traces. May be called again."""
        try:
            self.lane.close()
            if self.ends_in_order and not self.lane.has_failed:
                self.process_group.shut_down_nccl()
        finally:
            self.process_group.close()  # before the traces, which may have much to write: peers hear of it at once
            self.tracer.end()

    def set_module(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> None:
        """Make the module and its parameters' names known; called by `attach` before anything else."""
        self._module = module
        self.ignored_names = ignored_names
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        devices = {parameter.device for parameter in module.parameters() if parameter.requires_grad}
        if len(devices) == 1 and not self.owns_buckets:  # else they come with its buckets
            self.use_device(devices.pop())
        self.reset()

    def reset(self) -> None:
        """Run all initialisation of buckets again: at once for own buckets, when they next come for DDP's."""
        self._gradient_buckets.clear()
        if self.owns_buckets and self._module is not None:
            self.buckets = self.tensors_to_buckets(self.init_tensors(self._module), do_flatten=True)
            for bucket in self.buckets:
                self.use_device(bucket.flat.device)
            for bucket in self.buckets:
                self.init_operations(self._module, bucket)

    def use_device(self, device: torch.device) -> None:
        """Make known where the tensors are that the lane works on. Collective when it comes to a GPU first.

        Raises:
            ValueError: it is another GPU than before.
            CommunicationError: NCCL could not connect the ranks there.
        """
        if device.type == "cuda":
            self.lane.use_gpu(device)
            self.tracer.use_gpu(device)
            self.process_group.connect_nccl(device)

    def gradient_bucket(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor, *, index: int) -> BaguaBucket:
        """Return the bucket that stands for a DDP bucket of these parameters, with `flat` as its flat tensor.

        Buckets are told apart by their parameters' identity, since DDP forms other buckets after its first step;
        `index` is DDP's number of it, which is 0 for the first one of each backward.
        """
        if index == 0 and self.need_reset():
            self.reset()
        bucket = self._gradient_buckets.get(id(parameters[0]))
        if bucket is None or not _same(bucket.tensors, parameters):
            members = {id(parameter) for parameter in parameters}
            self._gradient_buckets = {
                key: other
                for key, other in self._gradient_buckets.items()
                if members.isdisjoint(id(tensor.parameter) for tensor in other.tensors)
            }
            tensors = [
                BaguaTensor(self._names.get(id(parameter), f"parameter {position} of bucket {index}"), parameter)
                for position, parameter in enumerate(parameters)
            ]
            if self._module is None:  # behind the plain hook; attach has told of all parameters at once
                self.tell_uncompressed({tensor.name: tensor.parameter for tensor in tensors})
            bucket = BaguaBucket(f"gradient bucket {index}", tensors, self.process_group, flat)
            self.init_operations(self._module, bucket)
            self._gradient_buckets[id(parameters[0])] = bucket
        bucket.flat = flat
        self.ends_in_order = True  # behind the plain hook nobody calls finish
        return bucket


def _same(tensors: Sequence[BaguaTensor], parameters: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == len(parameters) and all(
        tensor.parameter is parameter for tensor, parameter in zip(tensors, parameters, strict=True)
    )
