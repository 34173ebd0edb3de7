"""What attach does to modules that fully_shard has sharded: their gradients are reduce-scattered in a codec's bytes."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.bytegrad import ByteGradAlgorithm
from torchbagua.algorithms.compressed_allreduce import CompressedAllReduceAlgorithm, CompressedMeanAlgorithm
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.collectives import RowMean
from torchbagua.compressors import Identity, TensorSpec, sum_dtype
from torchbagua.events import Details
from torchbagua.torch_private import (
    fsdp_is_offloaded,
    fsdp_param_groups,
    fsdp_reduce_scatter,
    fsdp_shard_group,
    fsdp_shards,
    premultiplier,
)
from torchbagua.user_warning import warn_user


def sharded_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parts of `module`, itself among them, on which fully_shard was called, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second, and whoever has such a part did so
    if fsdp is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, fsdp.FSDPModule)}


def sharding_group(parts: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the ranks over which the gradients of all parts are reduce-scattered.

    Raises:
        ValueError: a part is sharded in a way that is not supported, or has a reduce-scatter of its own.
    """
    groups = []
    for name, part in parts.items():
        what = name or "the module"
        param_groups = fsdp_param_groups(part)
        if len(param_groups) > 1:
            raise ValueError(
                f"attach: {what} has {len(param_groups)} parameter groups on meshes of their own, for which torch "
                "takes no custom reduce-scatter; call fully_shard without shard_placement_fn's meshes"
            )
        for param_group in param_groups:
            group = fsdp_shard_group(param_group)
            if group is None:
                raise ValueError(
                    f"attach: {what} is replicated ({type(part).__name__}), which torch does in an all-reduce that "
                    "cannot be replaced; call fully_shard with a mesh of one dimension, without one for replicas"
                )
            if fsdp_is_offloaded(param_group):
                raise ValueError(f"attach: {what} has an OffloadPolicy that keeps parameters on the CPU; shard without")
            comm, is_torchs = fsdp_reduce_scatter(param_group)
            if not is_torchs:
                raise ValueError(
                    f"attach: {what} has the reduce-scatter {type(comm).__name__} already; leave out "
                    "set_custom_reduce_scatter, set_symm_mem_for_comm and "
                    "set_allocate_memory_from_process_group_for_comm"
                )
            for parameter, _ in fsdp_shards(param_group):
                if (mesh := parameter.device_mesh).ndim != 1:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"attach: {what} has parameters on a mesh of {mesh.ndim} dimensions, as of tensor parallelism; "
                        "supported is fully_shard alone, with a mesh of one"
                    )
            groups.append(group)
    if not groups:
        raise ValueError("attach: no part on which fully_shard was called has parameters")
    if any(group is not groups[0] for group in groups):
        raise ValueError("attach: all parts must be sharded over one group, got fully_shard with several meshes")
    return groups[0]


def check_sharded(algorithm: Algorithm) -> None:
    """Raise ValueError where gradients of sharded modules are not communicated by `algorithm`."""
    name = type(algorithm).__name__
    if not isinstance(algorithm, ByteGradAlgorithm | CompressedAllReduceAlgorithm):
        raise ValueError(
            f"attach: {name} does not take modules on which fully_shard was called; ByteGradAlgorithm and "
            "CompressedAllReduceAlgorithm do"
        )
    if algorithm.error_feedback:
        raise ValueError(
            f"attach: {name}: error_feedback must be False for modules on which fully_shard was called: every rank "
            "would keep a residual of all parameters, and not of its shard"
        )
    if not algorithm.average:
        raise ValueError(
            f"attach: {name}: average must be True for modules on which fully_shard was called, which say themselves "
            "by what to divide: set_gradient_divide_factor(1)"
        )


def scattered_by(impl: AlgorithmImpl, module: torch.nn.Module) -> ExitStack:
    """Have `impl` reduce-scatter the gradients of all parts until what is returned is closed; then torch does again.

    Raises:
        ValueError: it respects nodes, and these have different numbers of ranks.
    """
    node_ranks = impl.process_group.node_ranks
    if impl.algorithm.hierarchical and len(set(map(len, node_ranks))) > 1:
        raise ValueError(
            f"attach: {type(impl.algorithm).__name__}: hierarchical must be False for sharded modules where nodes have "
            f"different numbers of ranks, got {node_ranks}"
        )
    names = {id(one): name for name, one in module.named_parameters()}
    seen: set[int] = set()
    with ExitStack() as undo:  # closed here only where one of these steps raises
        for part_name, part in sharded_parts(module).items():
            for param_group in fsdp_param_groups(part):
                if id(param_group) in seen:  # fully_shard([a, b]): two parts communicate together
                    continue
                seen.add(id(param_group))
                row = [(names[id(one)], length) for one, length in fsdp_shards(param_group) if one.requires_grad]
                own = RowScatter(impl, f"gradients of {part_name or type(part).__name__}", row)
                undo.callback(part.set_custom_reduce_scatter, fsdp_reduce_scatter(param_group)[0])
                part.set_custom_reduce_scatter(own)
        return undo.pop_all()


class RowScatter:
    """The reduce-scatter of one FSDP parameter group: a `torch.distributed.fsdp` ReduceScatter, by its interface.

    Args:
        impl: whose group and codecs are used.
        name: in events and errors.
        row: the names of the parameters that are trained, and the padded lengths of their shards.
    """

    def __init__(self, impl: AlgorithmImpl, name: str, row: list[tuple[str, int]]) -> None:
        self._impl = impl
        self._name = name
        self._row = row
        self._means: dict[tuple[int, torch.dtype, torch.device, float], RowMean] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output, on the current stream."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or mean of own row of all ranks' `input_tensor` to `output_tensor`; FSDP calls it in backward.

        On CPUs, and over gloo, it returns when that is there. Over NCCL everything is launched on the current stream.

        Raises:
            ValueError: `op` is none that FSDP uses.
            CommunicationError: a rank is gone or did not take part in time.
        """
        impl = self._impl
        impl.use_device(input_tensor.device)
        mean = self._mean(output_tensor.numel(), input_tensor, self._divisor(op))
        run = partial(self._run, mean, input_tensor, output_tensor)
        if input_tensor.is_cuda and impl.process_group.has_nccl:
            run()
        else:
            impl.lane.submit(run).result()

    def _run(self, mean: RowMean, x_N: torch.Tensor, out_L: torch.Tensor) -> None:
        tracer = self._impl.process_group.tracer
        details = Details(bucket=self._name, num_elements=x_N.numel(), raw_bytes=x_N.nbytes)
        try:
            with tracer.span("bucket", details), tracer.range(self._name):
                dtype = sum_dtype(out_L.dtype)
                sums_L = out_L if out_L.dtype == dtype else torch.empty_like(out_L, dtype=dtype)
                mean(x_N, sums_L)
                if sums_L is not out_L:
                    out_L.copy_(sums_L)
        except BaseException:
            self._impl.process_group.close()  # so that other ranks are told at once
            raise

    def _divisor(self, op: Any) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return float(self._impl.process_group.size)
        if (factor := premultiplier(op)) is not None:
            return 1.0 / factor
        raise ValueError(f"torchbagua: FSDP's reduce-scatter must be AVG, SUM or PREMUL_SUM, got {op}")

    def _mean(self, num_elements: int, x_N: torch.Tensor, divisor: float) -> RowMean:
        """Return what forms the mean; made anew where a row is another than before."""
        key = (num_elements, x_N.dtype, x_N.device, divisor)
        if key not in self._means:
            row = self._row
            if sum(length for _, length in row) != num_elements:
                warn_user(
                    f"torchbagua: {self._name}: not all parameters had a gradient, and FSDP does not say which: all "
                    "share blocks, and small ones lose precision; call set_reduce_scatter_unused_params(True)"
                )
                row = [(self._name, num_elements)]
            algorithm: CompressedMeanAlgorithm = self._impl.algorithm
            compressor, intra = algorithm.make_compressors()
            compressor = compressor if compressor.encodes(x_N.dtype) else Identity()
            intra = intra if intra.encodes(x_N.dtype) else Identity()
            self._means[key] = RowMean(
                self._impl.process_group,
                compressor,
                TensorSpec(
                    tuple(length for _, length in row),
                    x_N.dtype,
                    x_N.device,
                    self._name,
                    tuple((name, 0) for name, _ in row),
                ),
                divisor=divisor,
                intra_compressor=intra if algorithm.hierarchical else None,
            )
        return self._means[key]
