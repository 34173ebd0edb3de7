"""AlgorithmImpl: what runs an algorithm. With Algorithm, the interface of the built-in ones and of users' own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms.optimizer_steps import StepsTaken, StepWatch, parameters_of
from torchbagua.algorithms.rank_state import check_rank_state, owner_of
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.mean_codecs import codec_for_dtype
from torchbagua.collectives.agreement import fingerprint, require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.changed_layout import check_gradient_layouts
from torchbagua.runtime.gradient_buckets import GradientBuckets
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.parameter_state import ParameterState

if TYPE_CHECKING:
    from torchbagua.algorithms.base import Algorithm


class AlgorithmImpl:
    """The running part of an algorithm: bound to a group, with all state that changes.

    An impl that overrides `init_tensors` and `tensors_to_buckets` is a *weight algorithm*: it communicates weights, in
    buckets of its own. Any other is a *gradient algorithm*: it communicates gradients, in DDP's buckets, from a DDP
    communication hook.

    A subclass may override:

    - `init_operations`, `init_tensors` and `tensors_to_buckets`, which say what is communicated and how;
    - `need_reset`, `on_backward_begin`, the four `init_..._hook`, `on_step_taken` and `finish`, which are called at
      certain points of training;
    - `state_dict`, `load_state_dict` and `state_parameters`;
    - `weights_loaded`, if weights that the user loads must replace what the algorithm keeps of earlier ones;
    - `needs_grad_scaler` and `agree_on_overflow`;
    - `set_module`, `reset` and `close`, if the override calls that of this class.

    `Algorithm.reify`, `attach` and `comm_hook` call the other methods.

    Between two backward passes the lane of a gradient algorithm is idle, since DDP waits for all buckets at the end of
    each. So `loss_scale` and the flat tensors of buckets need no lock.

    Args:
        process_group: owned by the impl, and closed with it.
        algorithm: the description; `Algorithm.make_impl` passes `self`.

    Attributes:
        process_group: the group, with private communicators for the lane.
        algorithm: the description, whose fields are the arguments; None if the impl was made without.
        lane: runs what the impl communicates.
        tracer: tells the observers of the group what is done and when.
        buckets: the buckets of a weight algorithm; empty for a gradient algorithm, which uses DDP's.
        gradient_buckets: those that stand for DDP's, which are there after the first backward. To be iterated over.
        ignored_names: the parameters and buffers of the module that DDP was told to ignore.
        parameter_state: what the algorithm keeps of each parameter; set it if there is something. It is committed with
            each step that is taken, and is the state of the impl.
        optimizers: the optimizers whose steps the impl is told of. Without `attach` there are none, unless
            `Algorithm.reify` was given some.
        step_watches: one for each of these optimizers; it tells its listeners of each step.
        grad_scaler: the GradScaler that `attach` was given.
        loss_scale: the loss scale of the gradients of this backward; 1 unless `needs_grad_scaler` is True and there is
            a GradScaler.
        num_synchronised: how many backward passes have begun in which DDP hands over buckets.
        loading: the names in `buckets` of weights that `load_state_dict` of the module has written since the last step.
            `weights_loaded` comes later. Until then no round in flight must change them.
        has_joined: whether this rank has run out of data, and takes part with gradients of zero until the others have
            too (`torch.distributed.algorithms.Join`).
        ends_in_order: set it to True when all ranks are going to close the impl. What is under way in stream order is
            then finished; otherwise it is broken off.
        compressor: the codec of what is sent, from `Algorithm.make_codec`. See `codec_for`.
        load_effect: what `weights_loaded` does, in the message that says that weights were loaded.
        ended_by: the call that ends it, in the warning that nobody has made it. An adapter sets its own.

    Raises:
        TypeError: the class overrides `tensors_to_buckets` but not `init_tensors`.
    """

    load_effect: str = "and no round in flight changes them"
    ended_by: str = "detach() of what attach returned"

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
        self.compressor: Compressor = Identity() if algorithm is None else algorithm.make_codec()
        if self.averages_weights:
            process_group.move_beside_training()
        self.tracer = process_group.tracer
        self.lane = Lane(
            f"torchbagua lane of {cls.__name__}",
            on_failure=process_group.close,
            waiting=partial(process_group.tracer.span, "wait"),
            poll=process_group.poll,
        )
        self.buckets: list[BaguaBucket] = []
        self.ignored_names: frozenset[str] = frozenset()
        self.parameter_state: ParameterState[Any] | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_watches: list[StepWatch] = []
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.loss_scale = 1.0
        self.num_synchronised = 0
        self.has_joined = False
        self.ends_in_order = False
        self.gradient_buckets = GradientBuckets()
        self.loading: frozenset[str] = frozenset()
        self._names: Mapping[int, str] = {}
        self._module: torch.nn.Module | None = None
        self._gpu: torch.device | None = None
        self._warned_dtypes: set[torch.dtype] = set()
        self._steps = StepsTaken(self)
        self._at_close = ExitStack()

    @property
    def averages_weights(self) -> bool:
        """Whether this is a weight algorithm, with buckets of its own."""
        return type(self).init_tensors is not AlgorithmImpl.init_tensors

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether a loop that has a GradScaler must hand it to `attach`."""
        return False

    @property
    def leaves_ranks_apart(self) -> bool:
        """Whether ranks hold different weights as long as averaging is on, which detaching would make equal."""
        return False

    @property
    def averages_gradients_within_nodes(self) -> bool:
        """Whether DDP goes on averaging gradients within nodes, as these ranks are on nodes. By default not."""
        return False

    def open_node_gradients(self) -> "AlgorithmImpl":
        """Return a gradient algorithm over the ranks of this node, for the hook of a DDP of all ranks. Collective.

        It is closed with this impl. Called where `averages_gradients_within_nodes`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override AlgorithmImpl.open_node_gradients")

    def need_reset(self) -> bool:
        """Return True to have buckets initialised again.

        Called before the first bucket of a backward for a gradient algorithm, and at each step for a weight algorithm.
        """
        return False

    def on_backward_begin(self) -> None:
        """Do what must come before the first bucket of a backward, and before `need_reset`. By default nothing.

        Called for a gradient algorithm in every synchronised backward, on the thread of backward.
        """

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. Only a weight algorithm overrides it."""
        raise TypeError(f"{type(self).__name__} is a gradient algorithm: DDP gives it its tensors")

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets. Only a weight algorithm overrides it.

        Args:
            tensors: what `init_tensors` returned.
            do_flatten: True; it is there because Bagua's method has it.
        """
        raise TypeError(f"{type(self).__name__} must override tensors_to_buckets as it overrides init_tensors")

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append to `bucket` the operations that are to run on it. A subclass must override it.

        Args:
            module: the attached module; None without `attach`.
            bucket: a new bucket.
        """
        raise TypeError(f"{type(self).__name__} must override AlgorithmImpl.init_operations")

    def codec_for(self, bucket: BaguaBucket) -> Compressor:
        """Return `compressor`; or that of full precision, if `compressor` does not encode the dtype of the bucket."""
        return codec_for_dtype(self.compressor, bucket.flat.dtype)

    def _check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have the algorithm check the parameters that DDP passes to the standalone hook, and warn once for each dtype.

        If a filter makes its warning an error, other ranks do not wait for this one.
        """
        if self.algorithm is None:
            return
        dtypes = {parameter.dtype for parameter in self.algorithm.uncompressed(parameters).values()}
        if dtypes <= self._warned_dtypes:
            return
        self._warned_dtypes |= dtypes
        try:
            self.algorithm.check_parameters(parameters)
        except (UncompressedParametersWarning, ValueError) as error:
            self._fail(error)

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None] | None:
        """Return a function to call before each forward in training, with the inputs of the module; or None."""
        return None

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None] | None:
        """Return a function of (name, parameter) to call when the gradient of a parameter is accumulated; or None."""
        return None

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None] | None:
        """Return a function to call when autograd has finished a backward; or None. DDP may not have finished then."""
        return None

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None] | None:
        """Return a function to call at the end of each training step; or None.

        With several optimizers it is called once, when the last of them has stepped or was skipped by a GradScaler. Its
        argument is that optimizer. What belongs to each step of each optimizer goes into `on_step_taken`.
        """
        return None

    @property
    def commits_on_step(self) -> bool:
        """Whether the impl must be told of the steps that are taken."""
        return self.parameter_state is not None or type(self).on_step_taken is not AlgorithmImpl.on_step_taken

    def on_step_taken(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit what belongs to a step. Called after each step of each optimizer that was not skipped.

        By default it commits `parameter_state` for those parameters whose gradient holds an average from DDP. The
        function that `init_post_optimizer_step_hook` returned is called after this.

        Args:
            parameters: the parameters of the optimizer that have a gradient.
        """
        if self.parameter_state is not None:
            self.parameter_state.commit(parameters)

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Watch the steps of these optimizers, if the algorithm needs to know of them. `Algorithm.reify` calls it."""
        self.optimizers = list(optimizers)
        self._names = {id(one): f"parameter {index}" for index, one in enumerate(self.state_parameters())}
        self.step_watches = [StepWatch(optimizer) for optimizer in dict.fromkeys(optimizers)]
        if self.commits_on_step:
            self._steps.listen_to(self.step_watches)

    def step_taken(self) -> None:
        """Tell the impl that your optimizer has taken a step. Call it after each step if you use no `attach`.

        If you have a GradScaler, which may skip a step, or several synchronised backward passes before the first step,
        give `Algorithm.reify` the optimizer instead.

        Raises:
            RuntimeError: the impl watches its optimizers itself.
        """
        self._steps.tell(tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain tensors and numbers, keyed by parameter name.

        By default that is `parameter_state`, with the rank and the number of ranks that it belongs to.

        Raises:
            RuntimeError: parameters have no names, because there is neither `attach` nor an optimizer.
        """
        if self.parameter_state is None:
            return {}
        return {**owner_of(self.process_group), **self.parameter_state.state_dict(self._named_parameters())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Call it between two steps. Collective if there is a `parameter_state`.

        Raises:
            ValueError: `state` is that of another algorithm or of another rank.
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
        """Return the parameters that `parameter_state` belongs to. By default those of `optimizers`.

        Where there are no optimizers, since gradients are averaged by hand, all of the module.
        """
        if not self.optimizers and self._module is not None:
            return list(self._module.parameters())
        return [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """The same by their names in the module; by their places in the optimizers behind the standalone hook."""
        if not self._names:
            raise RuntimeError(
                f"{type(self).__name__}: behind the standalone hook parameters have no names to save state by; make "
                "the impl by reify(group, optimizer=optimizer), or use attach"
            )
        known = [parameter for parameter in self.state_parameters() if id(parameter) in self._names]
        return {self._names[id(one)]: one for one in known if self.compressor.encodes(one.dtype.to_real())}

    def agree_on_overflow(self, found_inf: bool) -> bool:
        """Return whether the GradScaler has to skip the step. By default as this rank's gradients say.

        Override it if all ranks must skip together although their gradients are not averaged.

        Args:
            found_inf: whether the gradients of this rank hold an Inf or NaN.
        """
        return found_inf

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Start anew from weights that the user has loaded, on the training thread. By default nothing.

        Called for a weight algorithm of several ranks when the first step after the load begins, before the optimizer
        changes anything, and by `Attachment.weights_changed`. Other ranks may come later, or not at all, so it sends
        nothing. An override drops what a round in flight would change of these weights, and notes them in
        `WeightBuckets.loads`, so that ranks compare them when they next meet.

        Args:
            values: copies of the loaded values, by the names of `buckets`; some of the weights, or all.
        """

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights, for as long as the context lasts; then each its own again.

        Collective. Nothing where gradients are averaged, since all ranks hold the same weights. A weight algorithm of
        yours overrides it, with `WeightBuckets.averaged` say.

        Raises:
            NotImplementedError: a weight algorithm does not override it.
        """
        if self.averages_weights:
            raise NotImplementedError(f"{type(self).__name__} must override AlgorithmImpl.averaged_weights")
        yield

    def own_weights(self) -> AbstractContextManager[None]:
        """Within `averaged_weights`, give this rank its own weights, for as long as the context lasts. Not collective.

        `Attachment.rank_state_dict` needs it there. A weight algorithm of yours overrides it, with `WeightBuckets.own`
        say.

        Raises:
            NotImplementedError: a weight algorithm does not override it.
        """
        if self.averages_weights:
            raise NotImplementedError(f"{type(self).__name__} must override AlgorithmImpl.own_weights")
        return nullcontext()

    def finish(self, *, failed: bool) -> bool:
        """End the work on the module, before `close`. Return whether this made the weights equal on all ranks.

        Args:
            failed: True if an exception ends the attachment. Other ranks may not call it then.
        """
        self.ends_in_order = not failed
        return False

    def close(self) -> None:
        """Finish what is queued, and end the lane, the private groups and the traces. A second call does nothing."""
        with self._at_close:
            self._steps.close()
            try:
                self.lane.close()
                if self.ends_in_order and not self.lane.has_failed:
                    self.process_group.end_in_order()
            finally:
                if self.parameter_state is not None:
                    self.parameter_state.close()
                self.process_group.close()  # before the traces, which may have much to write: peers notice at once
                self.tracer.end()

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the impl is closed, as `Attachment.detach` does it. For adapters."""
        self._at_close.callback(callback)

    def set_module(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> None:
        """Set the module, and make the buckets of a weight algorithm. Collective on GPUs.

        `attach` calls it after `Algorithm.reify`, after rank 0's weights and optimizer state
        were broadcast, and before hooks are installed. From then on parameters have their names in the module.

        Args:
            module: the attached module, without its DDP.
            ignored_names: names of parameters and buffers that DDP was told to ignore.
        """
        self._module = module
        self.ignored_names = ignored_names
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        devices = {parameter.device for parameter in module.parameters() if parameter.requires_grad}
        if len(devices) == 1 and not self.averages_weights:  # else they come with its buckets
            self.use_device(devices.pop())
        if not self.averages_weights:
            trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
            self.gradient_buckets.tensors_of({name: trained[name] for name in trained if name not in ignored_names})
        self.reset()

    def reset(self) -> None:
        """Initialise buckets again: those of a weight algorithm at once, DDP's when they next come.

        It is called when no backward is under way. For a gradient algorithm that is before the first bucket of a
        backward. For a weight algorithm it is between two steps, before the function that
        `init_post_optimizer_step_hook` returned. An override first waits for what the lane is doing with the buckets,
        and then calls this.
        """
        self.gradient_buckets.clear()
        if self.averages_weights and self._module is not None:
            self.buckets = self.tensors_to_buckets(self.init_tensors(self._module), do_flatten=True)
            for bucket in self.buckets:
                self.use_device(bucket.flat.device)
            for bucket in self.buckets:
                self.init_operations(self._module, bucket)

    def use_device(self, device: torch.device) -> None:
        """Set the device of the tensors that the lane works on. The first call with a GPU is collective.

        Raises:
            ValueError: it is another GPU than before, the process group has no backend for it, or that lacks an
                operation; this is then an error on all ranks.
            CommunicationError: the backend could not connect the ranks there.
        """
        if device.type != "cpu" and device != self._gpu:  # it is asked for every bucket
            self.process_group.world.check_device(device)
            self.lane.use_gpu(device)
            if device.type == "cuda":  # elsewhere observers are told when the host began and ended
                self.tracer.use_gpu(device)
            self.process_group.use_device(device)
            self.process_group.check_operations(device, type(self.algorithm).__name__)
            self._gpu = device

    def begin_backward(self, *, has_joined: bool) -> None:
        """Prepare for a backward; `comm_hook` calls it before the first bucket.

        Args:
            has_joined: see the attribute of this name.

        Raises:
            RuntimeError: the memory layout of a parameter has changed; names it.
        """
        self.has_joined = has_joined
        self.num_synchronised += 1
        has_changed = self.gradient_buckets.layout_watch.look()
        if self.commits_on_step and not has_joined:
            self._steps.before_backward()
        if self.needs_grad_scaler:
            # Once a backward: on a GPU it waits for what has been computed so far.
            self.loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        self.on_backward_begin()
        if has_changed:  # after `on_backward_begin`, which may tell other ranks of it
            self._fail(self.gradient_buckets.layout_watch.own_error(self.process_group.rank))
        if self.need_reset():
            self.reset()

    def _check_layouts(self, bucket: BaguaBucket) -> None:
        try:
            if not self.has_joined:
                check_gradient_layouts(bucket)
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error, after which other ranks do not wait for this one: the lane ends and closes the groups."""

        def fail() -> NoReturn:
            raise RuntimeError(str(error))

        self.lane.submit(fail)
        raise error

    def gradient_bucket(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor, *, index: int) -> BaguaBucket:
        """Return the bucket for a DDP bucket, with `flat` as its flat tensor; `comm_hook` calls it.

        Args:
            parameters: the parameters of the DDP bucket. They identify it, since DDP forms other buckets after its
                first step.
            flat: the buffer of the DDP bucket.
            index: DDP's number of the bucket, for names.
        """
        bucket = self.gradient_buckets.find(parameters)
        if bucket is None:
            names = [
                self._names.get(id(parameter), f"parameter {position} of bucket {index}")
                for position, parameter in enumerate(parameters)
            ]
            tensors = self.gradient_buckets.tensors_of(dict(zip(names, parameters, strict=True)))
            if self._module is None:  # attach has checked all parameters at once
                self._check_parameters({tensor.name: tensor.parameter for tensor in tensors})
            bucket = BaguaBucket(f"gradient bucket {index}", tensors, self.process_group, flat)
            self._check_layouts(bucket)
            self.init_operations(self._module, bucket)
            self.gradient_buckets.add(bucket)
        bucket.flat = flat
        self.ends_in_order = True  # behind the standalone hook nobody calls finish
        return bucket
