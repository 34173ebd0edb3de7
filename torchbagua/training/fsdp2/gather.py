"""Implements attach's quantize_weights: gathers the weights of sharded modules compressed with a codec."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch

from torchbagua._torch import fsdp_all_gather, fsdp_gathered_dtypes, fsdp_shard_group
from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.row_gather import RowGather
from torchbagua.training.fsdp2.comm_runner import FsdpCommRunner
from torchbagua.training.fsdp2.rows import CommunicatingPart


def install_weight_gathers(
    undo: ExitStack,
    runner: FsdpCommRunner,
    parts: Sequence[CommunicatingPart],
    codec: Compressor,
    *,
    hierarchical: bool,
) -> None:
    """Gather the weights of all parts with `codec` until `undo` is closed, which restores torch's all-gather."""
    for part in parts:
        gather = WeightGather(runner, part, codec, hierarchical=hierarchical)
        undo.callback(part.part.reshard)  # after torch's gather is restored: drops the decoded weights
        undo.callback(part.part.set_custom_all_gather, fsdp_all_gather(part.param_group)[0])
        part.part.set_custom_all_gather(gather)


class WeightGather:
    """The all-gather of one FSDP parameter group; implements the AllGather interface of `torch.distributed.fsdp`.

    Each rank encodes its shards of the parameters, which form one row. All ranks decode all rows, including their own.
    """

    def __init__(
        self, runner: FsdpCommRunner, part: CommunicatingPart, codec: Compressor, *, hierarchical: bool
    ) -> None:
        self._runner = runner
        self._part = part
        self._codec = codec
        self._name = f"weights of {part.label}"
        self._group = fsdp_shard_group(part.param_group)
        self._torchs, _ = fsdp_all_gather(part.param_group)
        self._gather_of = cache(partial(RowGather, runner.group, codec, hierarchical=hierarchical))
        dtypes = fsdp_gathered_dtypes(part.param_group)
        self._has_warned = len(dtypes) > 1 or not all(map(codec.encodes, dtypes))  # attach has warned already

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the output, on the current stream."""
        with torch.inference_mode(False):  # the lane runs outside of inference mode and may not write to its tensors
            memory: torch.Tensor = self._torchs.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Write all ranks' `input_tensor`, encoded and decoded, to `output_tensor`, in forward and in backward.

        In stream order everything is launched on the current stream, even with `async_op`. Otherwise it returns when
        all rows are gathered.

        With `reshard_after_forward=k`, backward gathers the weights that forward has decoded over groups of k ranks.
        Torch gathers them, in full precision, so backward computes with weights that are bitwise equal to forward's.
        """
        dtype = input_tensor.dtype
        if group is not self._group or not self._codec.encodes(dtype):
            if group is self._group and not self._has_warned:  # attach did not see the policy that casts to this dtype
                self._has_warned = True
                with self._runner.failure.guard():  # if a filter makes it an error, other ranks do not wait
                    warn_user(why_in_full_precision(self._name, self._codec, {dtype}), UncompressedParametersWarning)
            return self._torchs(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        row = self._part.whole_row
        assert row.num_elements == input_tensor.numel(), "FSDP gathers whole rows"
        gather = self._gather_of(row.spec(input_tensor, self._name))
        self._runner.run(self._runner.group, self._name, output_tensor, partial(gather, input_tensor, output_tensor))
        return None


def why_in_full_precision(name: str, codec: Compressor, dtypes: set[torch.dtype]) -> str:
    """Return the warning that weights of these dtypes, called `name`, are not compressed."""
    kinds = " and ".join(sorted(map(str, dtypes)))
    why = f"{codec} does not encode {kinds}"
    if len(dtypes) > 1 or dtypes == {torch.uint8}:
        why = "FSDP gathers parameters of several dtypes as bytes; set MixedPrecisionPolicy's param_dtype"
    return f"torchbagua: {name} are gathered in full precision, because {why}"
