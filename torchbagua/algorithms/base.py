"""Algorithm, the base class that describes an algorithm, and the registry that finds algorithms by name."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torchbagua import native
from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.codecs.base import Compressor, Identity, MeanCodecs, check_compression
from torchbagua.collectives.agreement import stable_repr
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer, Run
from torchbagua.observe.tracer import check_observers
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.optimizer_steps import check_optimizer, unwrap
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_runner import WeightRunner

PLAIN_TYPES = (bool, int, float, str, type(None))


class Algorithm:
    """Describes what to communicate and how: frozen, printable, picklable. Subclasses are frozen dataclasses.

    A subclass implements `make_impl`. The ranks compare its dataclass fields when it is attached or reified.

    Attributes:
        averages_weights: whether this is a weight algorithm, whose impl calls `WeightRunner.average`. If False, it is a
            gradient algorithm.
    """

    averages_weights: ClassVar[bool] = False

    @property
    def averages_gradients_within_nodes(self) -> bool:
        """Whether DDP keeps averaging gradients within each node that has several ranks. False by default.

        Override it in an algorithm that averages weights between nodes. Its impl then sets
        `open_node_gradients` of `WeightRunner.average`.
        """
        return False

    @staticmethod
    def init(name: str, **kwargs: Any) -> "Algorithm":
        """Return the algorithm registered as `name`, constructed with `kwargs`.

        Raises:
            KeyError: no algorithm is registered as `name`. The error lists the registered names.
        """
        return get(name)(**kwargs)

    @classmethod
    def for_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer], **arguments: Any) -> "Algorithm":
        """Return the algorithm for `attach(module, optimizers, name)`, which specifies the algorithm by name.

        Override it if the constructor needs an optimizer. `arguments` are further constructor arguments, which an
        adapter (an integration) received.
        """
        return cls(**arguments)

    def prepare(self) -> None:
        """Run the steps that may fail on this rank alone, before any group is opened. By default: load native kernels.

        Override it if the algorithm uses no kernels, or needs further preparation.
        """
        native.load()

    def make_codec(self) -> Compressor:
        """Return the codec of the gradients or weights that the algorithm sends. By default, full precision."""
        return Identity()

    def make_shard_codecs(self) -> MeanCodecs | None:
        """Return the codecs for the gradients of modules sharded by fully_shard. None (default) if not supported.

        Override it if the algorithm averages gradients with the codec of `make_codec` and without error feedback. For a
        sharded module, these codecs then form the mean, and `AlgorithmImpl.init_operations` is not called.

        Raises:
            ValueError: an argument of the algorithm does not support sharded modules.
        """
        return None

    def uncompressed(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the subset of `parameters` that is sent in full precision because the codec does not encode it.

        Override it if the algorithm compresses only part of the parameters.
        """
        codec = checked_codec(self)
        if type(codec) is Identity:  # compresses nothing
            return {}
        return {
            name: parameter for name, parameter in parameters.items() if not codec.encodes(parameter.dtype.to_real())
        }

    def check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Issue an UncompressedParametersWarning that names the `uncompressed` subset of `parameters`, if any.

        An override may raise ValueError if the algorithm cannot be attached to a module with these parameters.
        """
        found = self.uncompressed(parameters)
        if not found:
            return
        names, dtypes = list(found), {parameter.dtype for parameter in found.values()}
        warn_user(
            f"torchbagua: {type(self).__name__} sends {len(names)} of {len(parameters)} parameters in full precision, "
            f"because {checked_codec(self)} does not encode {' or '.join(sorted(map(str, dtypes)))}: "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}, "
            f"{sum(parameter.nbytes for parameter in found.values()):,} bytes each time they are sent",
            UncompressedParametersWarning,
        )

    def arguments(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, by name: the dataclass fields that `repr` shows, as text.

        A function is represented by its qualified name.

        Raises:
            TypeError: a function, such as a lambda, has no qualified name.
        """
        if not dataclasses.is_dataclass(self):
            return {}
        shown = [field.name for field in dataclasses.fields(self) if field.repr]
        return {name: stable_repr(getattr(self, name), f"{type(self).__name__}: {name}") for name in shown}

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return the arguments that a saved state depends on, by name: numbers, strings or None.

        They are saved with the state and compared when it is loaded. By default, these are all dataclass fields that
        `repr` shows. Override it to return fewer if a state can be loaded with different arguments. It is not called
        for an algorithm without state.
        """
        if not dataclasses.is_dataclass(self):
            return {}
        # Call the base class's method, because an override may add names that are not fields, as QAdam's does.
        return {
            name: value if isinstance(value := getattr(self, name), PLAIN_TYPES) else text
            for name, text in Algorithm.arguments(self).items()
        }

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError if this algorithm cannot load a state. The error names the argument and both values.

        Args:
            saved: the return value of `state_arguments` when the state was saved. A name that the saving or the loading
                release lacks is not compared.
            state: the return value of the impl's `state_dict`.
            process_group: the group of the attachment that loads the state.
        """
        for name, own in self.state_arguments(process_group).items():
            if name in saved and saved[name] != own:
                raise ValueError(
                    f"{type(self).__name__}: the state was saved with {name}={saved[name]!r}, but the attached "
                    f"algorithm has {name}={own!r}; attach with the saved value, on which the state depends, or load "
                    "only the weights, before attach"
                )

    def own_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the algorithm was constructed with. By default, none."""
        return []

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError if the algorithm cannot be attached with these optimizers. By default, never.

        `attach` and `reify` call it once with the optimizers that they received. An override may warn about optimizers
        that train badly with the algorithm.
        """

    def make_impl(self, runner: Any) -> AlgorithmImpl:
        """Return the impl that `runner` runs. `attach` and `reify` call it. A subclass must override it.

        `runner` is a `WeightRunner` if `averages_weights` is True, and otherwise a `GradientRunner`.
        """
        raise TypeError(f"{type(self).__name__} must override Algorithm.make_impl")

    def reify(
        self,
        process_group: dist.ProcessGroup | BaguaProcessGroup,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        observers: Sequence[Observer] = (),
        timeout: timedelta | None = None,
    ) -> Runner:
        """Bind the algorithm to a process group. Collective: the ranks compare the algorithm and open private groups.

        For `ddp.register_comm_hook(algorithm.reify(group), comm_hook)`. `attach` does the same and more.

        Args:
            process_group: the ranks that train together. Pass a BaguaProcessGroup to specify which rank is on which
                node.
            optimizer: the optimizer or optimizers that step on the communicated gradients or weights. An algorithm that
                stores state per parameter, such as error feedback, commits it with each of their steps. Without them,
                call `GradientRunner.step_taken` after each step. QAdamAlgorithm knows its optimizer.
            observers: are notified of every communication phase and of each training step.
            timeout: the longest wait for another rank. By default, the timeout of `process_group`.

        Returns:
            The state of the hook, which also contains the algorithm's own state. Close it when training ends.

        Raises:
            TypeError: `process_group` is not a process group, `optimizer` is not an optimizer, or `make_impl` returned
                something other than an impl of the algorithm's kind.
            ValueError: ranks disagree on the algorithm, its arguments or the package version, the algorithm does not
                support `optimizer`, or a backend lacks an operation.
            TimeoutError: a rank did not call it in time.
            CommunicationError: a private group could not be opened.
            RuntimeError: the native library exists but cannot be loaded.
        """
        where = f"{type(self).__name__}.reify"
        check_observers(where, observers)
        given = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
        optimizers = [unwrap(each) for each in given]
        for unwrapped in optimizers:
            check_optimizer(where, unwrapped)
        runner = bind(self, process_group, optimizers, observers, timeout)
        runner.name_parameters()
        if isinstance(runner, GradientRunner):
            runner.start_meetings()
        return runner


def check_flags(algorithm: Algorithm, *names: str) -> None:
    """Raise TypeError unless these arguments of `algorithm` are True or False."""
    for name in names:
        if not isinstance(value := getattr(algorithm, name), bool):
            raise TypeError(f"{type(algorithm).__name__}: {name} must be True or False, got {value!r}")


def check_codecs(algorithm: Algorithm, *names: str) -> None:
    """Raise ValueError unless these arguments of `algorithm` are codecs. Normalize the spelling of codec names."""
    for name in names:
        codec = check_compression(f"{type(algorithm).__name__}: {name}", getattr(algorithm, name))
        object.__setattr__(algorithm, name, codec)


def check_at_least(algorithm: Algorithm, name: str, least: int, kind: Any = int) -> None:
    """Raise TypeError or ValueError unless this argument of `algorithm` is a number of `kind`, at least `least`.

    `kind` is anything that isinstance accepts: int, or float | int.
    """
    value = getattr(algorithm, name)
    if not isinstance(value, kind) or isinstance(value, bool):
        kind_name = "an integer" if kind is int else "a number"
        raise TypeError(f"{type(algorithm).__name__}: {name} must be {kind_name}, got {value!r}")
    if not value >= least:  # NaN compares false
        raise ValueError(f"{type(algorithm).__name__}: {name} must be at least {least}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class _Entry:
    algorithm: Callable[..., Algorithm]
    description: str | None


_REGISTRY: dict[str, _Entry] = {}


def register(name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
    """Register an algorithm under a name, for `Algorithm.init` and `attach`.

    Args:
        name: a name that is not registered yet.
        algorithm: the class, or a function that returns an algorithm.
        description: a one-line description, which `available_algorithms` returns.

    Raises:
        TypeError: `name` is not a string, or `algorithm` is not callable.
        ValueError: `name` is already registered.
    """
    if not isinstance(name, str):
        raise TypeError(f"register: name must be a string, got {name!r}")
    if not callable(algorithm):
        raise TypeError(f"register: algorithm must be a class or a function that returns one, got {algorithm!r}")
    if name in _REGISTRY:
        raise ValueError(f"register: an algorithm named {name!r} is already registered")
    _REGISTRY[name] = _Entry(algorithm, description)


def get(name: str) -> Callable[..., Algorithm]:
    """Return the constructor registered as `name`.

    Raises:
        KeyError: no algorithm is registered as `name`. The error lists the registered names.
    """
    if name not in _REGISTRY:
        raise KeyError(f"no algorithm is named {name!r}; the registered names are {sorted(_REGISTRY)}")
    return _REGISTRY[name].algorithm


def init_for(algorithm: Algorithm | str, optimizers: Sequence[torch.optim.Optimizer], **arguments: Any) -> Algorithm:
    """Return the algorithm registered under this name, to attach with `optimizers`. Return an Algorithm unchanged.

    See `Algorithm.for_optimizers`.
    """
    if not isinstance(algorithm, str):
        return algorithm
    constructor = get(algorithm)
    for_optimizers: Callable[..., Algorithm] | None = getattr(constructor, "for_optimizers", None)
    return constructor(**arguments) if for_optimizers is None else for_optimizers(optimizers, **arguments)


def available_algorithms() -> dict[str, str | None]:
    """Return the registered names, each with its description."""
    return {name: entry.description for name, entry in _REGISTRY.items()}


def bind(
    algorithm: "Algorithm",
    process_group: dist.ProcessGroup | BaguaProcessGroup,
    optimizers: Sequence[torch.optim.Optimizer],
    observers: Sequence[Observer],
    timeout: timedelta | None,
    *,
    rank_invariants: Mapping[str, Any] | None = None,
    run_settings: Callable[[], Mapping[str, str]] = dict,
    refusal: str | None = None,
) -> GradientRunner | WeightRunner:
    """Compare an algorithm across ranks, open private groups, and return the runner that uses them. Collective.

    All ranks must have equal `rank_invariants`. If one has a `refusal`, the text of a warning that a filter makes an
    error there, all ranks raise it before a group is opened. Traces record `run_settings()`.
    """
    name = type(algorithm).__name__
    if optimizers:
        algorithm.check_optimizers(optimizers)
    algorithm.prepare()
    own: dict[str, Any] = {"the algorithm": type(algorithm).__qualname__}
    own |= {f"{name}'s argument {argument}": value for argument, value in algorithm.arguments().items()}
    own[f"{name}'s codec"] = stable_repr(checked_codec(algorithm), f"{name}: the codec")
    own.update(rank_invariants or {})
    if isinstance(process_group, BaguaProcessGroup):
        group = process_group.duplicate(timeout=timeout, observers=observers, rank_invariants=own, refusal=refusal)
    else:
        group = BaguaProcessGroup(
            process_group, timeout=timeout, observers=observers, rank_invariants=own, refusal=refusal
        )
    close = group.close
    try:
        group.open()
        group.private.check_operations(torch.device("cpu"), name)
        runner = WeightRunner(group, algorithm) if algorithm.averages_weights else GradientRunner(group, algorithm)
        close = runner.close
        runner.watch_steps(optimizers or algorithm.own_optimizers())
        group.compare_clocks()
        if group.tracer.is_on:
            group.tracer.start(_describe_run(algorithm, group, run_settings()))
        return runner
    except BaseException:
        close()
        raise


def checked_codec(algorithm: "Algorithm") -> Compressor:
    """Return the algorithm's codec. Raises TypeError if `make_codec` does not return a Compressor."""
    codec: object = algorithm.make_codec()
    if not isinstance(codec, Compressor):
        raise TypeError(
            f"{type(algorithm).__name__}.make_codec must return a Compressor, such as torchbagua.codecs.MinMaxUInt8(), "
            f"got {codec!r}"
        )
    return codec


def _describe_run(algorithm: "Algorithm", group: BaguaProcessGroup, run_settings: Mapping[str, str]) -> Run:
    name = type(algorithm).__name__
    return Run(
        id=group.id,
        algorithm=name,
        description=stable_repr(algorithm, name) if dataclasses.is_dataclass(algorithm) else repr(algorithm),
        rank=group.rank,
        nodes=tuple(group.nodes),
        settings=run_settings,
        board=group.board,
        clock_offsets=group.clock_offsets,
    )
