"""AlgorithmImpl: what runs an algorithm. With Algorithm, the interface of the built-in ones and of users' own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchbagua.algorithms.gradient_buckets import GradientBuckets
from torchbagua.algorithms.rank_state import check_rank_state, owner_of
from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import BaguaProcessGroup, fingerprint, require_same_progress
from torchbagua.compressors import Compressor, Identity
from torchbagua.lane import Lane
from torchbagua.optimizers import StepsTaken, StepWatch, parameters_of
from torchbagua.state import ParameterState
from torchbagua.user_warning import warn_user

if TYPE_CHECKING:
    from torchbagua.algorithms.base import Algorithm


class AlgorithmImpl:
    """An algorithm bound to a group, with all of its changing state.

    What a subclass may override: `needs_grad_scaler`, `need_reset`, `on_backward_begin`, `init_tensors`,
    `tensors_to_buckets`, `init_operations`, `uncompressed`, the four `init_..._hook`, `on_step_taken`,
    `state_parameters`, `state_dict`, `load_state_dict`, `agree_on_overflow` and `finish`; and, where the override calls
    this class's, `set_module`, `reset` and `close`. The rest is called by `reify`, `attach` and `comm_hook`.

    An impl that overrides `init_tensors` communicates weights in buckets of its own; any other communicates gradients
    in DDP's buckets, from a DDP communication hook.

    The lane works on a gradient algorithm's buckets during a backward only, since DDP waits for all futures at its end:
    between two of them the lane is idle. So `loss_scale`, and the flat tensors of buckets, need no lock.

    Args:
        process_group: owned by the impl, closed with it.
        algorithm: the description that it runs; `make_impl` hands over itself.

    Attributes:
        process_group: the group, with private communicators for the lane.
        algorithm: what it was given, whose fields are the impl's arguments; None where it was made without.
        lane: runs what the impl communicates.
        tracer: tells the group's observers what is done and when.
        buckets: a weight algorithm's buckets; empty for a gradient algorithm, which runs in DDP's.
        ignored_names: the module's parameters and buffers that DDP was told to ignore.
        parameter_state: what the algorithm keeps of each parameter; an impl that keeps something sets it. It is
            committed with each step that is taken, and is the impl's state.
        optimizers: those whose steps the impl hears of; none behind the plain hook, unless `reify` was given some.
        step_watches: one for each of these optimizers, to which whoever has to know of its steps listens.
        grad_scaler: what `attach` was given.
        loss_scale: that of the gradients of this backward; 1 unless `needs_grad_scaler` and there is one.
        has_joined: whether this rank has run out of data, and takes part with gradients of zero until the others have
            too (`torch.distributed.algorithms.Join`).
        ends_in_order: whether all ranks are expected to close it, and NCCL's groups to be shut down and not broken off.
        compressor: how values of parameters are sent; an impl that compresses sets its own. See `codec_for`.

    Raises:
        TypeError: the class overrides `tensors_to_buckets` but not `init_tensors`.
    """

    compressor: Compressor = Identity()

    # A subclass names its own description, so that its fields are typed.
    algorithm: Any

    def __init__(self, process_group: BaguaProcessGroup, algorithm: "Algorithm | None" = None) -> None:
        cls = type(self)
        overrides_buckets = cls.tensors_to_buckets is not AlgorithmImpl.tensors_to_buckets
        if overrides_buckets and not self.averages_weights:
            raise TypeError(
                f"{cls.__name__} overrides tensors_to_buckets without init_tensors: a gradient algorithm runs in DDP's "
                "buckets, and a weight algorithm overrides both"
            )
        self.process_group = process_group
        self.algorithm = algorithm
        if self.averages_weights:
            process_group.open_private_nccl()
        self.tracer = process_group.tracer
        self.lane = Lane(
            f"torchbagua lane of {cls.__name__}",
            on_failure=process_group.close,
            waiting=partial(process_group.tracer.span, "wait"),
            poll=process_group.poll_nccl,
        )
        self.buckets: list[BaguaBucket] = []
        self.ignored_names: frozenset[str] = frozenset()
        self.parameter_state: ParameterState[Any] | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_watches: list[StepWatch] = []
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.loss_scale = 1.0
        self.has_joined = False
        self.ends_in_order = False
        self._gradient_buckets = GradientBuckets()
        self._names: Mapping[int, str] = {}
        self._module: torch.nn.Module | None = None
        self._gpu: torch.device | None = None
        self._told_dtypes: set[torch.dtype] = set()
        self._steps = StepsTaken(self)

    @property
    def averages_weights(self) -> bool:
        """Whether this is a weight algorithm, with buckets of its own."""
        return type(self).init_tensors is not AlgorithmImpl.init_tensors

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether a loop that has a GradScaler must hand it to `attach`."""
        return False

    def need_reset(self) -> bool:
        """Return True to have buckets initialised again; asked at the first bucket of a backward, or at each step."""
        return False

    def on_backward_begin(self) -> None:
        """Do what comes before the first bucket of a backward, and before `need_reset` is asked. By default nothing.

        Called for a gradient algorithm, in every synchronised backward, on the thread of that.
        """

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. Overridden by weight algorithms only."""
        raise TypeError(f"{type(self).__name__} is a gradient algorithm: DDP gives it its tensors")

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets; `do_flatten` is of Bagua's signature. Overridden by weight algorithms only."""
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
        """Return a function to call at the end of each training step, or None.

        That is once for all attached optimizers: when the last of them has stepped, or was skipped by a GradScaler. It
        is called with that one. What belongs to each step of each optimizer goes into `on_step_taken`.
        """
        return None

    @property
    def commits_on_step(self) -> bool:
        """Whether it must hear of the steps that are taken."""
        return self.parameter_state is not None or type(self).on_step_taken is not AlgorithmImpl.on_step_taken

    def on_step_taken(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit what belongs to a step; called once for each step of an optimizer, after it, unless it was skipped.

        What belongs to the end of a training step, of several optimizers perhaps, goes into the function that
        `init_post_optimizer_step_hook` returns; that is called after this.

        By default commits `parameter_state` of those of the parameters into whose gradient DDP has put an average.

        Args:
            parameters: the optimizer's that have a gradient.
        """
        if self.parameter_state is not None:
            self.parameter_state.commit(parameters)

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hear of the steps of these optimizers, where the algorithm needs to; called by `reify`."""
        self.optimizers = list(optimizers)
        self._names = {id(one): f"parameter {index}" for index, one in enumerate(self.state_parameters())}
        self.step_watches = [StepWatch(optimizer) for optimizer in dict.fromkeys(optimizers)]
        if self.commits_on_step:
            self._steps.listen_to(self.step_watches)

    def step_taken(self) -> None:
        """Say that the loop's optimizer has taken a step, after it: behind the plain hook nobody else does.

        A loop with a GradScaler, which may skip a step, or with several synchronised backward passes before the first
        step gives `reify` its optimizer instead.

        Raises:
            RuntimeError: the impl hears of the steps of its optimizers itself.
        """
        self._steps.tell(tensor.parameter for bucket in self._gradient_buckets for tensor in bucket.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain tensors and numbers, keyed by parameter name.

        By default `parameter_state`, and whose it is.

        Raises:
            RuntimeError: it is kept behind the plain hook, which knows no names, and no optimizer.
        """
        if self.parameter_state is None:
            return {}
        return {**owner_of(self.process_group), **self.parameter_state.state_dict(self._named_parameters())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Where there is a `parameter_state`, collective, and between two steps.

        Raises:
            ValueError: `state` is not this algorithm's, or that of another rank.
            CommunicationError: other ranks have a state of other parameters, or did not load theirs in time.
        """
        owner = type(self).__name__
        if self.parameter_state is None:
            if state:
                raise ValueError(f"{owner} has no state to load, got the keys {sorted(state)}")
            return
        check_rank_state(owner, state, self.parameter_state.names, self.process_group)
        self.parameter_state.load_state_dict(owner, state, self._named_parameters())
        # What ranks hold decides whether they sum it in the next backward.
        names = list(state[self.parameter_state.names[0]])
        progress = {"as a digest of the names in its state": fingerprint(names)}
        world = self.process_group.world
        self.lane.submit(lambda: require_same_progress(world, progress, "loading the state")).result()
        self.reset()

    def state_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that `parameter_state` is of, as far as optimizers know them."""
        return [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """The same by their names in the module; by their places in the optimizers behind the plain hook."""
        if not self._names:
            raise RuntimeError(
                f"{type(self).__name__}: behind the plain hook parameters have no names to save state by; make the "
                "impl by reify(group, optimizer=optimizer), or use attach"
            )
        known = [parameter for parameter in self.state_parameters() if id(parameter) in self._names]
        return {self._names[id(one)]: one for one in known if self.compressor.encodes(one.dtype.to_real())}

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
        self._steps.close()
        try:
            self.lane.close()
            if self.ends_in_order and not self.lane.has_failed:
                self.process_group.shut_down_nccl()
        finally:
            if self.parameter_state is not None:
                self.parameter_state.close()
            self.process_group.close()  # before the traces, which may have much to write: peers hear of it at once
            self.tracer.end()

    def set_module(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> None:
        """Make the module and its names known, and make a weight algorithm's buckets. Collective on GPUs.

        Called by `attach` when the impl has been reified, `tell_uncompressed` was called and rank 0's weights and
        optimizer state were broadcast, if they had to be, and before hooks are installed. The names take the place of
        those by place in the optimizers that `watch_steps` gave.
        """
        self._module = module
        self.ignored_names = ignored_names
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        devices = {parameter.device for parameter in module.parameters() if parameter.requires_grad}
        if len(devices) == 1 and not self.averages_weights:  # else they come with its buckets
            self.use_device(devices.pop())
        self.reset()

    def reset(self) -> None:
        """Run all initialisation of buckets again: at once for own buckets, when they next come for DDP's.

        Called when no backward is under way: of a gradient algorithm before a backward's first bucket, of a weight
        algorithm between two steps, before the function of `init_post_optimizer_step_hook`. An override first ends what
        its lane has in flight on the buckets, and then calls this.
        """
        self._gradient_buckets.clear()
        if self.averages_weights and self._module is not None:
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
        if device.type == "cuda" and device != self._gpu:  # it is asked for every bucket
            self.lane.use_gpu(device)
            self.tracer.use_gpu(device)
            self.process_group.connect_nccl(device)
            self._gpu = device

    def begin_backward(self, *, has_joined: bool) -> None:
        """Do what comes before a backward's first bucket; called by the communication hook.

        Args:
            has_joined: see the attribute.
        """
        self.has_joined = has_joined
        if self.commits_on_step and not has_joined:
            self._steps.before_backward()
        if self.needs_grad_scaler:
            # Once a backward: on a GPU it waits for what has been computed so far.
            self.loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        self.on_backward_begin()
        if self.need_reset():
            self.reset()

    def gradient_bucket(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor, *, index: int) -> BaguaBucket:
        """Return the bucket that stands for a DDP bucket of these parameters, with `flat` as its flat tensor.

        Buckets are told apart by their parameters' identity, since DDP forms other buckets after its first step;
        `index` is DDP's number of it, for names.
        """
        bucket = self._gradient_buckets.find(parameters)
        if bucket is None:
            tensors = [
                BaguaTensor(self._names.get(id(parameter), f"parameter {position} of bucket {index}"), parameter)
                for position, parameter in enumerate(parameters)
            ]
            if self._module is None:  # behind the plain hook; attach has told of all parameters at once
                self.tell_uncompressed({tensor.name: tensor.parameter for tensor in tensors})
            bucket = BaguaBucket(f"gradient bucket {index}", tensors, self.process_group, flat)
            self.init_operations(self._module, bucket)
            self._gradient_buckets.add(bucket)
        bucket.flat = flat
        self.ends_in_order = True  # behind the plain hook nobody calls finish
        return bucket
