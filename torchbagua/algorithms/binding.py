"""bind: turns the description of an algorithm into a runner that communicates over private groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchbagua._stable_repr import stable_repr
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer, Run
from torchbagua.runtime.runner import Runner

if TYPE_CHECKING:
    from torchbagua.algorithms.base import Algorithm


def bind(
    algorithm: "Algorithm",
    process_group: dist.ProcessGroup | BaguaProcessGroup,
    optimizers: Sequence[torch.optim.Optimizer],
    observers: Sequence[Observer],
    timeout: timedelta | None,
    *,
    rank_invariants: Mapping[str, Any] | None = None,
    run_settings: Mapping[str, str] | None = None,
    refusal: str | None = None,
) -> Runner:
    """Compare an algorithm across ranks, open private groups, and return the runner that uses them. Collective.

    Args:
        algorithm: the algorithm.
        process_group, observers, timeout: see `Algorithm.reify`.
        optimizers: the optimizers that step on the communicated gradients or weights, if they are known.
        rank_invariants: further values that must be equal on all ranks, by the names that errors use.
        run_settings: settings that traces record in addition to the algorithm and its group, by name.
        refusal: an UncompressedParametersWarning that a warnings filter turns into an error on this rank. All ranks
            raise it, before a group is opened.

    Raises:
        UncompressedParametersWarning: a rank has a `refusal`.
        TypeError, ValueError, TimeoutError, CommunicationError, RuntimeError: see `Algorithm.reify`.
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
        group.check_operations(torch.device("cpu"), name)
        runner = Runner(group, algorithm)
        close = runner.close
        runner.watch_steps(optimizers or algorithm.own_optimizers())
        group.compare_clocks()
        if group.tracer.is_on:
            group.tracer.start(_describe_run(algorithm, group, run_settings or {}))
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
