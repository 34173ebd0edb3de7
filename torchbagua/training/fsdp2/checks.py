"""The checks of attach for sharded modules, on this rank alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchbagua._torch import (
    fsdp_all_gather,
    fsdp_all_reduce_hook,
    fsdp_own_gathers,
    fsdp_param_groups,
    fsdp_reduce_scatter,
)
from torchbagua.algorithms.base import Algorithm, available_algorithms, get
from torchbagua.codecs.base import MeanCodecs, by_name, needs_feedback
from torchbagua.collectives.agreement import stable_repr
from torchbagua.training.fsdp2.gathers import why_in_full_precision
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.parts import check_parameters_inside, communicating_parts

Parts = Mapping[str, Any]
"""The parts on which fully_shard was called, by their names in the module."""


def check_sharding(module: torch.nn.Module, parts: Parts, algorithm: Algorithm, given: Sharding | None) -> None:
    """Raise ValueError if `algorithm` cannot be attached to a module with these sharded parts, possibly none."""
    sharding = given or Sharding()
    if not parts:
        _refuse_options(module, sharding)
        return
    if not algorithm.averages_weights:
        shard_codecs("attach", algorithm)
        check_parameters_inside(module, communicating_parts(module, parts))
        _check_reduce_scatters(parts)
        if sharding.replicate_group is not None:
            _check_all_reduce_hooks(parts)
        if sharding.quantize_weights is not None:
            _check_all_gathers(module, parts)
        return
    if sharding.replicate_group is None:
        raise ValueError(
            f"attach: {type(algorithm).__name__} averages weights over ranks that hold the same weights, but the "
            "module is sharded. If several meshes train copies of the module, give the ranks that hold the same shards "
            "as this rank: torchbagua.fsdp.attach(..., replicate_group=...). To compress gradients within one mesh, "
            f"attach {' or '.join(_algorithms_of_shards())}"
        )
    if sharding.quantize_weights is not None:
        raise ValueError(
            f"attach: quantize_weights must be None with {type(algorithm).__name__}, which averages weights over "
            f"replicas and leaves the gathers of weights to torch; got {sharding.quantize_weights!r}"
        )


def shard_codecs(caller: str, algorithm: Algorithm) -> MeanCodecs:
    """Return the codecs with which `algorithm` sends the gradients of sharded modules."""
    name = type(algorithm).__name__
    try:
        codecs = algorithm.make_shard_codecs()
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from error
    if codecs is None:
        raise ValueError(
            f"{caller}: {name} does not support modules on which fully_shard was called; "
            f"{' and '.join(_algorithms_of_shards())} do"
        )
    if not isinstance(codecs, MeanCodecs):
        raise TypeError(
            f"{name}.make_shard_codecs must return a torchbagua.codecs.MeanCodecs, or None if the algorithm does not "
            f"support sharded modules, got {codecs!r}"
        )
    owner = f"{name}: the codec"
    compared = algorithm.make_codec()  # ranks compare it, and attach warns of dtypes that it does not encode
    if stable_repr(codecs.codec, owner) != stable_repr(compared, owner):
        raise TypeError(
            f"{name}.make_shard_codecs sends with {codecs.codec}, but make_codec returns {compared}; have both return "
            "the same codec"
        )
    for codec in (codecs.codec, codecs.intra_codec):
        if needs_feedback(codec):
            raise ValueError(
                f"{caller}: {name}.make_shard_codecs must not return a codec that needs error feedback, since sharded "
                f"modules have none; got {codec!r}"
            )
    return codecs


def check_even_nodes(algorithm: Algorithm, codecs: MeanCodecs, node_ranks: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the mean is hierarchical and nodes have different numbers of ranks."""
    if codecs.hierarchical and len(set(map(len, node_ranks))) > 1:
        raise ValueError(
            f"attach: {type(algorithm).__name__}: hierarchical must be False for sharded modules if nodes have "
            f"different numbers of ranks, got {node_ranks}"
        )


def unquantized_weights(module: torch.nn.Module, parts: Parts, sharding: Sharding) -> Iterator[str]:
    """Yield a message for each part whose weights are gathered in full precision despite `quantize_weights`."""
    if sharding.quantize_weights is None:
        return
    codec = by_name(sharding.quantize_weights)
    yield from filter(None, (why_in_full_precision(part, codec) for part in communicating_parts(module, parts)))


def _algorithms_of_shards() -> list[str]:
    """Return the names of the registered gradient algorithms that support sharded modules."""
    default = Algorithm.make_shard_codecs
    constructors = [get(name) for name in available_algorithms()]
    return sorted({cls.__name__ for cls in constructors if getattr(cls, "make_shard_codecs", default) is not default})


def _refuse_options(module: torch.nn.Module, sharding: Sharding) -> None:
    reason = f"since fully_shard was called on no part of {type(module).__name__}"
    if sharding.replicate_group is not None:
        raise ValueError(
            f"attach: replicate_group must be None {reason}; give the ranks that hold the whole module as process_group"
        )
    if sharding.quantize_weights is not None:
        raise ValueError(
            f"attach: quantize_weights must be None {reason}: its weights are not gathered; got "
            f"{sharding.quantize_weights!r}"
        )


def _param_groups(parts: Parts) -> Iterator[tuple[str, Any]]:
    """Yield each parameter group, with a label of its part."""
    for name, part in parts.items():
        for param_group in fsdp_param_groups(part):
            yield name or "the module", param_group


def _check_reduce_scatters(parts: Parts) -> None:
    for label, param_group in _param_groups(parts):
        comm, is_torchs = fsdp_reduce_scatter(param_group)
        if not is_torchs:
            raise ValueError(
                f"attach: {label} has the reduce-scatter {type(comm).__name__} already; leave out "
                "set_custom_reduce_scatter, set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm, "
                "and detach the algorithm of a module around it"
            )


def _check_all_reduce_hooks(parts: Parts) -> None:
    for label, param_group in _param_groups(parts):
        if (hook := fsdp_all_reduce_hook(param_group)) is not None:
            raise ValueError(
                f"attach: {label} has the all-reduce hook {hook!r} already, and replicate_group needs one; leave out "
                "set_all_reduce_hook, and detach the algorithm of a module around it"
            )


def _check_all_gathers(module: torch.nn.Module, parts: Parts) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for label, param_group in _param_groups(parts):
        comm, is_torchs = fsdp_all_gather(param_group)
        if not is_torchs:
            raise ValueError(
                f"attach: quantize_weights must be None if {label} has the all-gather {type(comm).__name__} already; "
                "leave out set_custom_all_gather, set_symm_mem_for_comm and "
                "set_allocate_memory_from_process_group_for_comm"
            )
        for parameter, cls in fsdp_own_gathers(param_group):
            raise ValueError(
                f"attach: quantize_weights must be None if {names[id(parameter)]} defines how it is gathered "
                f"({cls.__name__}.fsdp_pre_all_gather)"
            )
