"""The checks of attach that only sharded modules need, on this rank alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchbagua._torch import (
    fsdp_all_gather,
    fsdp_all_reduce_hook,
    fsdp_gathered_dtypes,
    fsdp_own_gathers,
    fsdp_param_groups,
    fsdp_reduce_scatter,
)
from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.gradient.bytegrad import ByteGradAlgorithm
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedAllReduceAlgorithm
from torchbagua.codecs.lookup import by_name
from torchbagua.training.fsdp2.gather import why_in_full_precision
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.fsdp2.rows import check_parameters_inside, communicating_parts

Parts = Mapping[str, Any]
"""On which fully_shard was called, by their names in the module."""


def check_sharding(module: torch.nn.Module, parts: Parts, algorithm: Algorithm, sharding: Sharding) -> None:
    """Raise ValueError if `algorithm` cannot be attached to a module with these parts, of which there may be none."""
    if not parts:
        _refuse_options(module, sharding)
        return
    if not algorithm.averages_weights:
        check_algorithm_of_shards("attach", algorithm)
        check_parameters_inside(module, communicating_parts(module, parts))
        _check_reduce_scatters(parts)
        if sharding.replicate_group is not None:
            _check_all_reduce_hooks(parts)
        if sharding.quantize_weights is not None:
            _check_all_gathers(module, parts)
        return
    if sharding.replicate_group is None:
        raise ValueError(
            f"attach: {type(algorithm).__name__} averages weights among ranks that hold the same ones, and the module "
            "is sharded: give the ranks that hold the same shards as this one, torchbagua.fsdp.attach(..., "
            "replicate_group=...), while several meshes train copies of it; to compress gradients within one mesh, "
            "attach ByteGradAlgorithm or CompressedAllReduceAlgorithm"
        )
    if sharding.quantize_weights is not None:
        raise ValueError(
            f"attach: quantize_weights must be None with {type(algorithm).__name__}, which averages weights over "
            f"replicas and leaves to torch what is gathered; got {sharding.quantize_weights!r}"
        )


def check_algorithm_of_shards(caller: str, algorithm: Algorithm) -> None:
    """Raise ValueError if gradients of sharded modules are not communicated by `algorithm`."""
    name = type(algorithm).__name__
    if not isinstance(algorithm, ByteGradAlgorithm | CompressedAllReduceAlgorithm):
        raise ValueError(
            f"{caller}: {name} does not take modules on which fully_shard was called; ByteGradAlgorithm and "
            "CompressedAllReduceAlgorithm do"
        )
    if algorithm.error_feedback:
        raise ValueError(
            f"{caller}: {name}: error_feedback must be False for modules on which fully_shard was called: every rank "
            "would keep a residual of all parameters, and not of its shard"
        )
    if not algorithm.average:
        raise ValueError(
            f"{caller}: {name}: average must be True for modules on which fully_shard was called, which say themselves "
            "by what to divide: set_gradient_divide_factor(1)"
        )


def unquantized_weights(module: torch.nn.Module, parts: Parts, sharding: Sharding) -> Iterator[str]:
    """Yield a message for each part whose weights are gathered in full precision, against `quantize_weights`."""
    if sharding.quantize_weights is None:
        return
    codec = by_name(sharding.quantize_weights)
    for part in communicating_parts(module, parts):
        dtypes = fsdp_gathered_dtypes(part.param_group)
        if len(dtypes) > 1 or not all(map(codec.encodes, dtypes)):
            yield why_in_full_precision(f"weights of {part.label}", codec, dtypes)


def _refuse_options(module: torch.nn.Module, sharding: Sharding) -> None:
    where = f"for {type(module).__name__}, on no part of which fully_shard was called"
    if sharding.replicate_group is not None:
        raise ValueError(
            f"attach: replicate_group must be None {where}; ranks that hold all of it are those of process_group"
        )
    if sharding.quantize_weights is not None:
        raise ValueError(
            f"attach: quantize_weights must be None {where}: its weights are not gathered; got "
            f"{sharding.quantize_weights!r}"
        )


def _check_reduce_scatters(parts: Parts) -> None:
    for part_name, part in parts.items():
        for comm, is_torchs in map(fsdp_reduce_scatter, fsdp_param_groups(part)):
            if not is_torchs:
                raise ValueError(
                    f"attach: {part_name or 'the module'} has the reduce-scatter {type(comm).__name__} already; leave "
                    "out set_custom_reduce_scatter, set_symm_mem_for_comm and "
                    "set_allocate_memory_from_process_group_for_comm, and detach what is attached to a module around it"
                )


def _check_all_reduce_hooks(parts: Parts) -> None:
    for part_name, part in parts.items():
        for hook in map(fsdp_all_reduce_hook, fsdp_param_groups(part)):
            if hook is not None:
                raise ValueError(
                    f"attach: {part_name or 'the module'} has the all-reduce hook {hook!r} already, and "
                    "replicate_group needs one; leave out set_all_reduce_hook, and detach what is attached to a "
                    "module around it"
                )


def _check_all_gathers(module: torch.nn.Module, parts: Parts) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for part_name, part in parts.items():
        for param_group in fsdp_param_groups(part):
            comm, is_torchs = fsdp_all_gather(param_group)
            if not is_torchs:
                raise ValueError(
                    f"attach: quantize_weights must be None where {part_name or 'the module'} has the all-gather "
                    f"{type(comm).__name__} already; leave out set_custom_all_gather, set_symm_mem_for_comm and "
                    "set_allocate_memory_from_process_group_for_comm"
                )
            for parameter, cls in fsdp_own_gathers(param_group):
                raise ValueError(
                    f"attach: quantize_weights must be None where {names[id(parameter)]} says itself how it is "
                    f"gathered ({cls.__name__}.fsdp_pre_all_gather)"
                )
