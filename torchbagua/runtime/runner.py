"""Runner: what drives an algorithm's impl, from `Algorithm.reify` to `close`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar, final

import torch

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.mean_codecs import codec_for_dtype
from torchbagua.collectives.agreement import fingerprint, require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.changed_layout import check_gradient_layouts
from torchbagua.runtime.gradient_buckets import GradientBuckets
from torchbagua.runtime.impl import AlgorithmImpl, check_impl
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.optimizer_steps import StepsTaken, StepWatch, parameters_of
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.rank_state import check_rank_state, owner_of
from torchbagua.runtime.weight_buckets import WeightBuckets

S = TypeVar("S", bound=ParameterState[Any])


@final
class Runner:
    """Runs an algorithm over a process group: the state of `comm_hook`, and what `Algorithm.reify` returns.

    It has the lane, the buckets and the state by parameter, is notified of backward passes and of the optimizers'
    steps, and calls the methods of an `AlgorithmImpl`. The constructor of an impl calls `keep`, `average`,
    `on_step_taken` and `on_close`, and its methods call `codec_for`. A loop with a standalone hook calls `step_taken`,
    `state_dict`, `load_state_dict` and `close`. `attach` and `comm_hook` call the others.

    Behind a standalone hook, a runner that was not closed ends when the garbage collector finds it.

    Between two backward passes the lane of a gradient algorithm is idle, since DDP waits for all buckets at the end of
    each. So `loss_scale` and the flat tensors of buckets need no lock.

    Args:
        process_group: owned by the runner, and closed with it.
        algorithm: the `Algorithm`, whose `make_impl` gives the impl.

    Attributes:
        process_group: the group, with private communicators for the lane.
        algorithm: the description.
        name: the algorithm's name, for errors.
        impl: what `make_impl` returned.
        codec: what `Algorithm.make_codec` returned; see `codec_for`.
        lane: runs what is communicated.
        tracer: notifies the observers of the group.
        buckets: the buckets of a weight algorithm; empty for a gradient algorithm, which uses DDP's.
        gradient_buckets: the buckets that mirror DDP's. Empty before the first backward. Iterable.
        ignored_names: the parameters and buffers of the module that DDP was told to ignore.
        optimizers: those whose steps it is notified of. Without `attach` there are none, unless `Algorithm.reify` was
            given some.
        step_watches: one for each of these optimizers; it notifies its listeners of each step.
        grad_scaler: the GradScaler that `attach` was given.
        loss_scale: the loss scale of the gradients of this backward; 1 unless `needs_grad_scaler` is True and there is
            a GradScaler.
        read_loss_scale: returns the loss scale, at the first bucket of a backward. `attach` sets it; without it the
            GradScaler is asked, which waits for all that a GPU has still to do.
        num_synchronised: how many backward passes have begun in which DDP hands over buckets.
        has_joined: whether this rank has run out of data, and takes part with gradients of zero until the others have
            too (`torch.distributed.algorithms.Join`).
        loading: the names in `buckets` of weights that `load_state_dict` of the module has written since the last step.
            `AlgorithmImpl.weights_loaded` comes later. Until then no round in flight must change them.
        ends_in_order: whether all ranks will call `close`. It then completes pending stream-ordered work, and otherwise
            aborts it.
        has_lost_ranks: set to True when a rank has left early, so that the others do not end in order.
        ended_by: the call that the missing-detach warning recommends. An adapter sets its own.

        What an impl sets, in its constructor:

        parameter_state: what it keeps of each parameter, by `keep`.
        weights: the weights that it averages, by `average`.
        needs_grad_scaler: whether a loop that has a GradScaler must pass it to `attach`.
        agree_on_overflow: a function of a bool, whether the gradients of this rank hold an Inf or NaN, that returns
            whether the GradScaler has to skip the step. By default as this rank's gradients say, and for a weight
            algorithm as those of any rank.
        replicas_diverge: returns whether ranks hold different weights now, that `detach` would make equal.
        open_node_gradients: returns the runner that averages gradients among the ranks of this node, for the hook of a
            DDP of all ranks; collective. None unless DDP goes on averaging gradients within nodes.
        load_effect: what `AlgorithmImpl.weights_loaded` does, in the message that says that weights were loaded.

    Raises:
        TypeError: `make_impl` returned something other than an impl of the algorithm's kind.
    """

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        self.process_group = process_group
        self.algorithm = algorithm
        self.name = type(algorithm).__name__
        self.codec: Compressor = algorithm.make_codec()
        self.tracer = process_group.tracer
        self.lane = Lane(
            f"torchbagua lane of {self.name}",
            on_failure=process_group.close,
            waiting=partial(process_group.tracer.span, "wait"),
            poll=process_group.poll,
        )
        self.buckets: list[BaguaBucket] = []
        self.gradient_buckets = GradientBuckets()
        self.ignored_names: frozenset[str] = frozenset()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_watches: list[StepWatch] = []
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.loss_scale = 1.0
        self.read_loss_scale: Callable[[], float] | None = None
        self.num_synchronised = 0
        self.has_joined = False
        self.loading: frozenset[str] = frozenset()
        self.ends_in_order = False
        self.has_lost_ranks = False
        self.ended_by = "detach() of what attach returned"
        self.parameter_state: ParameterState[Any] | None = None
        self.weights: WeightBuckets | None = None
        self.needs_grad_scaler = False
        self.agree_on_overflow: Callable[[bool], bool] = bool
        self.replicas_diverge: Callable[[], bool] = lambda: False
        self.open_node_gradients: Callable[[], Runner] | None = None
        self.load_effect = "and no round in flight changes them"
        self._kept_parameters: Callable[[], list[torch.Tensor]] | None = None
        self._names: Mapping[int, str] = {}
        self._module: torch.nn.Module | None = None
        self._gpu: torch.device | None = None
        self._checked_dtypes: set[torch.dtype] = set()
        self._steps = StepsTaken(self, self.name)
        self._joined_listeners: list[Callable[[], None]] = []
        self._step_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._watches_steps = False
        self._is_closed = False
        self._before_close = ExitStack()
        self._after_close = ExitStack()
        if algorithm.averages_weights:
            process_group.move_beside_training()
        try:
            self.impl: AlgorithmImpl = algorithm.make_impl(self)
            check_impl(self)
        except BaseException:
            self.close()
            raise

    @property
    def averages_weights(self) -> bool:
        """Whether it runs a weight algorithm, with buckets of its own."""
        return bool(self.algorithm.averages_weights)

    def codec_for(self, bucket: BaguaBucket) -> Compressor:
        """Return `codec`; or that of full precision, if `codec` does not encode the dtype of the bucket."""
        return codec_for_dtype(self.codec, bucket.flat.dtype)

    def keep(self, state: S, parameters: Callable[[], list[torch.Tensor]] | None = None) -> S:
        """Keep a state by parameter: steps that are taken commit it, and `state_dict` contains it. Return it.

        Args:
            state: the state; becomes `parameter_state`.
            parameters: returns the parameters that it belongs to. By default those of `optimizers`; where there are
                none, since gradients are averaged by hand, all of the module.
        """
        self._require_constructor("keep")
        self.parameter_state = state
        self._kept_parameters = parameters
        return state

    def average(self, weights: WeightBuckets) -> WeightBuckets:
        """Make this a weight algorithm, which averages `weights`. Return them.

        If there are several ranks, all of them then skip a step together if the GradScaler of one does.
        """
        self._require_constructor("average")
        self.weights = weights
        self.replicas_diverge = lambda: weights.has_final_mean
        if self.process_group.size > 1:
            self.needs_grad_scaler = True
            self.agree_on_overflow = weights.lockstep.agree_on_overflow
        return weights

    # Steps of the optimizers.

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Watch the steps of these optimizers, if the algorithm needs to know of them. `Algorithm.reify` calls it."""
        self.optimizers = list(optimizers)
        self._watches_steps = True
        kept = self._parameters_of_state()
        self._names = {id(parameter): f"parameter {index}" for index, parameter in enumerate(kept)}
        self.step_watches = [StepWatch(optimizer) for optimizer in dict.fromkeys(optimizers)]
        if self.commits_on_step:
            self._steps.listen_to(self.step_watches)

    def on_step_taken(self, listener: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Call `listener` after each step of each optimizer that was not skipped; for the constructor of an impl.

        Its argument is the parameters of the optimizer that have a gradient. It is called before the function that
        `AlgorithmImpl.init_post_optimizer_step_hook` returned, and before `parameter_state` is committed for those
        parameters whose gradient holds an average from DDP.
        """
        self._require_constructor("on_step_taken")
        self._step_listeners.append(listener)

    def _require_constructor(self, method: str) -> None:
        if self._watches_steps:
            raise RuntimeError(f"{self.name}: Runner.{method} was called too late; call it in the impl's constructor")

    @property
    def commits_on_step(self) -> bool:
        """Whether it must be notified of the steps that are taken."""
        return self.parameter_state is not None or bool(self._step_listeners)

    def step_taken(self) -> None:
        """Tell it that your optimizer has taken a step. Call it after each step if you use no `attach`.

        If you have a GradScaler, which may skip a step, or several synchronised backward passes before the first step,
        give `Algorithm.reify` the optimizer instead.

        Raises:
            RuntimeError: it watches its optimizers itself.
        """
        self._steps.tell(tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors)

    def commit_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit what belongs to a step; `StepsTaken` calls it.

        Args:
            parameters: the parameters of the optimizer that have a gradient.
        """
        for listener in self._step_listeners:
            listener(parameters)
        if self.parameter_state is not None:
            self.parameter_state.commit(parameters)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain tensors and numbers, keyed by parameter name.

        It merges the impl's state, `parameter_state`, and the rank and the number of ranks.

        Raises:
            RuntimeError: parameters have no names, because there is neither `attach` nor an optimizer.
        """
        own = self.impl.state_dict()
        if self.parameter_state is None:
            return own
        return {**owner_of(self.process_group), **self.parameter_state.state_dict(self._named_parameters()), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Call it between two steps. Collective if the algorithm keeps something.

        Raises:
            ValueError: `state` is that of another algorithm or of another rank.
            CommunicationError: other ranks have a state of other parameters, or did not load theirs in time.
        """
        kept = self.parameter_state
        if kept is None:
            self.impl.load_state_dict(state)
            return
        check_rank_state(self.name, state, kept.names, self.process_group)
        known = {*owner_of(self.process_group), *kept.names}
        self.impl.load_state_dict({key: value for key, value in state.items() if key not in known})
        kept.load_state_dict(self.name, state, self._named_parameters())
        # What ranks hold decides whether they sum it in the next backward.
        names = list(state[kept.names[0]])
        progress = {"as a digest of the names in its state": fingerprint(names)}
        world = self.process_group.world
        self.lane.submit(lambda: require_same_progress(world, progress, "loading the state")).result()
        self.impl.reset()

    def _parameters_of_state(self) -> list[torch.Tensor]:
        if self._kept_parameters is not None:
            return self._kept_parameters()
        if not self.optimizers and self._module is not None:
            return list(self._module.parameters())
        return [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that have state, by module name, or by optimizer index behind a standalone hook."""
        if not self._names:
            raise RuntimeError(
                f"{self.name}: behind the standalone hook parameters have no names to save state by; make the runner "
                "by reify(group, optimizer=optimizer), or use attach"
            )
        known = [parameter for parameter in self._parameters_of_state() if id(parameter) in self._names]
        encodes = self.codec.encodes
        return {self._names[id(parameter)]: parameter for parameter in known if encodes(parameter.dtype.to_real())}

    # The module and its buckets.

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
            trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
            self.gradient_buckets.tensors_of({name: trained[name] for name in trained if name not in ignored_names})
        self.impl.reset()

    def is_attached_to(self, module: torch.nn.Module) -> bool:
        """Return whether this is the attached module, or its DDP, and the runner is not closed."""
        is_own = self._module is not None and self._module in (module, getattr(module, "module", None))
        return is_own and not self._is_closed

    def rebuild_buckets(self) -> None:
        """Make the buckets of a weight algorithm again, and forget those that stand for DDP's."""
        self.gradient_buckets.clear()
        if self.averages_weights and self._module is not None:
            self.buckets = self.impl.tensors_to_buckets(self.impl.init_tensors(self._module), do_flatten=True)
            for bucket in self.buckets:
                self.use_device(bucket.flat.device)
            for bucket in self.buckets:
                self.impl.init_operations(self._module, bucket)

    def reset_if_needed(self) -> None:
        """Have the impl make buckets again, if it says that it needs to; when no backward is under way."""
        if self.impl.need_reset():
            self.impl.reset()

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
            self.process_group.check_operations(device, self.name)
            self._gpu = device

    # A backward of a gradient algorithm.

    def begin_backward(self, *, has_joined: bool) -> None:
        """Prepare for a backward; `comm_hook` calls it before the first bucket.

        Args:
            has_joined: see the attribute of this name.

        Raises:
            RuntimeError: the memory layout of a parameter has changed; names it.
        """
        self.has_joined = has_joined
        self.num_synchronised += 1
        layout_watch = self.gradient_buckets.layout_watch
        has_changed = layout_watch.look()
        if self.commits_on_step and not has_joined:
            self._steps.before_backward()
        if self.needs_grad_scaler:
            scaler = self.grad_scaler
            self.loss_scale = 1.0 if scaler is None else (self.read_loss_scale or scaler.get_scale)()
        needs_reset = self.impl.need_reset()
        if has_changed:  # after `need_reset`, which may tell other ranks of it
            self._fail(layout_watch.own_error(self.process_group.rank))
        if needs_reset:
            self.impl.reset()

    def on_joined_backward(self, listener: Callable[[], None]) -> None:
        """Call `listener` after the last bucket of each backward of others in which this rank takes part with zeros.

        In stream order only: elsewhere the lane has the bucket then.
        """
        self._joined_listeners.append(listener)

    def end_joined_backward(self) -> None:
        """Notify the listeners of `on_joined_backward`; `comm_hook` calls it after the last bucket."""
        for listener in self._joined_listeners:
            listener()

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
            bucket = BaguaBucket(f"gradient bucket {index}", tensors, self.process_group, flat)
            self._check_new(bucket)
            self.impl.init_operations(self._module, bucket)
            self.gradient_buckets.add(bucket)
        bucket.flat = flat
        self.ends_in_order = True  # behind the standalone hook nobody calls finish
        return bucket

    def _check_new(self, bucket: BaguaBucket) -> None:
        """Check dtypes and layouts. If only this rank raises, by a filter of its warnings say, the others raise too."""
        try:
            if self._module is None:  # attach has checked all parameters at once
                self._check_dtypes({tensor.name: tensor.parameter for tensor in bucket.tensors})
            if not self.has_joined:
                check_gradient_layouts(bucket)
        except (UncompressedParametersWarning, ValueError, RuntimeError) as error:
            self._fail(error)

    def _check_dtypes(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have the algorithm check parameters: once for each dtype that it does not compress."""
        dtypes = {parameter.dtype for parameter in self.algorithm.uncompressed(parameters).values()}
        if not dtypes <= self._checked_dtypes:
            self._checked_dtypes |= dtypes
            self.algorithm.check_parameters(parameters)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error, after which other ranks do not wait for this one: the lane ends and closes the groups."""

        def fail() -> NoReturn:
            raise RuntimeError(str(error))

        self.lane.submit(fail)
        raise error

    # The end.

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give all ranks the mean of their weights for a while. Collective; see `AlgorithmImpl.averaged_weights`."""
        return self.impl.averaged_weights()

    def own_weights(self) -> AbstractContextManager[None]:
        """Within `averaged_weights`, give this rank its own weights for a while. Not collective.

        `Attachment.rank_state_dict` needs it there.

        Raises:
            NotImplementedError: an algorithm with buckets of its own has no `weights`.
        """
        if self.weights is not None:
            return self.weights.means.own()
        if self.averages_weights:
            raise NotImplementedError(f"{type(self.impl).__name__} must call runner.average")
        return nullcontext()

    def finish(self, *, failed: bool) -> bool:
        """End the work on the module, before `close`. Return whether this made the weights equal on all ranks.

        Args:
            failed: True if an exception ends the attachment. Other ranks may not call it then.
        """
        self.ends_in_order = False
        if failed:
            return False
        has_mean = self.impl.finish()
        self.ends_in_order = not self.has_lost_ranks
        return has_mean

    def close(self) -> None:
        """Finish what is queued, and end the lane, the private groups and the traces. A second call does nothing."""
        self._is_closed = True
        with self._after_close:
            try:
                self._before_close.close()
            finally:
                self._close_lane_and_groups()

    def _close_lane_and_groups(self) -> None:
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

    def on_close(self, callback: Callable[[], object], *, first: bool = False) -> None:
        """Call `callback` when it is closed, as `Attachment.detach` does it. For impls and adapters.

        Args:
            callback: what to call.
            first: call it before lane and groups are closed: it ends what uses them.
        """
        (self._before_close if first else self._after_close).callback(callback)
