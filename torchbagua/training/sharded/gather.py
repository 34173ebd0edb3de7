"""What attach's quantize_weights does to sharded modules: their weights are gathered in a codec's bytes."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua._torch import (
    fsdp_all_gather,
    fsdp_gathered_dtypes,
    fsdp_own_gathers,
    fsdp_param_groups,
    fsdp_shard_group,
)
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm
from torchbagua.codecs import by_name, check_compression, needs_feedback
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.row_gather import RowGather
from torchbagua.runtime.shards import sharded_parts
from torchbagua.training.sharded.rows import CommunicatingPart, Row, RowRunner, spec_of_row


def check_quantize_weights(
    module: torch.nn.Module, quantize_weights: str | Compressor | None, algorithm: Algorithm
) -> str | Compressor | None:
    """Return the codec as `check_compression` does; ValueError unless it is None, or can gather `module`'s weights."""
    quantize_weights = check_compression("attach: quantize_weights", quantize_weights)
    if quantize_weights is None:
        return None
    if needs_feedback(quantize_weights):
        raise ValueError(
            "attach: quantize_weights must not be a codec that needs error feedback, since what it leaves out of "
            f"weights is lost; got {quantize_weights!r}"
        )
    parts = sharded_parts(module)
    if not parts:
        raise ValueError(
            f"attach: quantize_weights must be None for {type(module).__name__}, on no part of which fully_shard was "
            f"called: its weights are not gathered; got {quantize_weights!r}"
        )
    if algorithm.averages_weights:
        raise ValueError(
            f"attach: quantize_weights must be None with {type(algorithm).__name__}, which averages weights over "
            f"replicas and leaves to torch what is gathered; got {quantize_weights!r}"
        )
    names = {id(one): name for name, one in module.named_parameters()}
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
    return quantize_weights


def gathered_by(
    runner: RowRunner, parts: Sequence[CommunicatingPart], quantize_weights: str | Compressor, *, strict: bool
) -> ExitStack:
    """Have the impl gather the weights of all parts until what is returned is closed; then torch does again.

    Args:
        runner: whose impl's group is used. Its ranks are those over which the parts are sharded.
        parts: whose weights they are.
        quantize_weights: the codec.
        strict: raise where it does not encode weights; by default they travel in full precision, and are named then.

    Raises:
        ValueError: `strict`, and there are such.
    """
    codec = by_name(quantize_weights)
    with ExitStack() as undo:  # closed here only where one of these steps raises
        for one in parts:
            own = WeightGather(runner, one, codec)
            dtypes = fsdp_gathered_dtypes(one.param_group)
            if strict and (len(dtypes) > 1 or not all(map(codec.encodes, dtypes))):
                raise ValueError(f"attach: strict=True, and {own.in_full_precision(dtypes)}")
            undo.callback(one.part.reshard)  # when torch's is back: what has been decoded is not computed with any more
            undo.callback(one.part.set_custom_all_gather, fsdp_all_gather(one.param_group)[0])
            one.part.set_custom_all_gather(own)
        return undo.pop_all()


class WeightGather:
    """The all-gather of one FSDP parameter group: a `torch.distributed.fsdp` AllGather, by its interface.

    Each rank encodes its shards of the parameters, one row, and all decode all rows, their own too.

    Args:
        runner: whose impl's group is used.
        part: whose weights they are, which torch gathers so far.
        codec: of the rows.
    """

    def __init__(self, runner: RowRunner, part: CommunicatingPart, codec: Compressor) -> None:
        self._runner = runner
        self._part = part
        self._codec = codec
        self._name = f"weights of {part.label}"
        self._group = fsdp_shard_group(part.param_group)
        self._torchs, _ = fsdp_all_gather(part.param_group)
        self._gathers: dict[tuple[Row, torch.dtype, torch.device], RowGather] = {}
        self._told = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the output, on the current stream."""
        with torch.inference_mode(False):  # outside of it, as the lane is, nobody may write to an inference tensor
            memory: torch.Tensor = self._torchs.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Write all ranks' `input_tensor`, coded, to `output_tensor`; FSDP calls it in forward and in backward.

        On CPUs, and over gloo, it returns when they are there. Over NCCL everything is launched on the current stream,
        also where `async_op` says that it need not be.

        Under `reshard_after_forward=k` backward gathers over groups of k ranks what forward has decoded. Torch does
        that, in full: so backward computes with the bits that forward has computed with.

        Returns:
            What torch's own returns where that is called; else None, which tells FSDP to wait for no more than the
                current stream.

        Raises:
            CommunicationError: a rank is gone or did not take part in time.
        """
        dtype = input_tensor.dtype
        if group is not self._group or not self._codec.encodes(dtype):
            if group is self._group and not self._told:
                self._told = True
                warn_user(f"torchbagua: {self.in_full_precision({dtype})}")
            return self._torchs(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        impl = self._runner.impl
        impl.use_device(input_tensor.device)
        gather = partial(self._gather(input_tensor), input_tensor, output_tensor)
        self._runner.run(impl.process_group, self._name, output_tensor, gather)
        return None

    def in_full_precision(self, dtypes: set[torch.dtype]) -> str:
        """Return the words that say that these dtypes are not compressed."""
        kinds = " and ".join(sorted(map(str, dtypes)))
        why = f"{self._codec} does not encode {kinds}"
        if len(dtypes) > 1 or dtypes == {torch.uint8}:
            why = "FSDP gathers parameters of several dtypes as bytes; set MixedPrecisionPolicy's param_dtype"
        return f"{self._name} are gathered in full precision, because {why}"

    def _gather(self, x_L: torch.Tensor) -> RowGather:
        row = self._part.whole_row
        assert sum(length for _, length in row) == x_L.numel(), "FSDP gathers whole rows"
        key = (row, x_L.dtype, x_L.device)
        if key not in self._gathers:
            impl, spec = self._runner.impl, spec_of_row(row, x_L, self._name)
            self._gathers[key] = RowGather(
                impl.process_group, self._codec, spec, hierarchical=impl.algorithm.hierarchical
            )
        return self._gathers[key]
