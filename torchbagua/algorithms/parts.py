"""A gradient bucket whose tensors are not all treated alike: parts of it in flat tensors of their own."""

from collections.abc import Sequence

import torch

from torchbagua.bucket import BaguaBucket, BaguaTensor
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.memory_order import flat_length


def part_of(bucket: BaguaBucket, tensors: Sequence[BaguaTensor], dtype: torch.dtype) -> BaguaBucket:
    """Return a bucket of some tensors of `bucket`, in `dtype`, without operations."""
    num_elements = sum(flat_length(tensor.parameter) for tensor in tensors)
    return BaguaBucket(bucket.name, tensors, bucket.group, bucket.flat.new_zeros(num_elements, dtype=dtype))


def append_parts(bucket: BaguaBucket, parts: Sequence[BaguaBucket]) -> None:
    """Append to `bucket` what runs its parts, one after the other, on its values."""

    def run_parts(whole: BaguaBucket, group: BaguaProcessGroup) -> None:
        values = {id(tensor): values for tensor, values in whole.parts(whole.flat)}
        for part in parts:
            for tensor, place in part.parts(part.flat):
                place.copy_(values[id(tensor)])
            part.run()
            for tensor, place in part.parts(part.flat):
                values[id(tensor)].copy_(place)

    bucket.append_python_op(run_parts)
