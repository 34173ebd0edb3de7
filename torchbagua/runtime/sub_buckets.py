"""Sub-buckets of a gradient bucket: a subset of its tensors, in a separate flat tensor and dtype."""

from collections.abc import Sequence

import torch

from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameters import BaguaTensor, flat_length


def sub_bucket_of(bucket: BaguaBucket, tensors: Sequence[BaguaTensor], dtype: torch.dtype) -> BaguaBucket:
    """Return a bucket of the given tensors of `bucket`, in `dtype`, without operations."""
    num_elements = sum(flat_length(tensor.parameter) for tensor in tensors)
    return BaguaBucket(bucket.name, tensors, bucket.group, bucket.flat.new_zeros(num_elements, dtype=dtype))


def append_sub_buckets(bucket: BaguaBucket, sub_buckets: Sequence[BaguaBucket]) -> None:
    """Append to `bucket` an operation that runs its sub-buckets in sequence on its values."""

    def run_sub_buckets(whole: BaguaBucket, group: BaguaProcessGroup) -> None:
        values = {id(tensor): values for tensor, values in whole.parts(whole.flat)}
        for sub in sub_buckets:
            for tensor, place in sub.parts(sub.flat):
                place.copy_(values[id(tensor)])
            sub.run()
            for tensor, place in sub.parts(sub.flat):
                values[id(tensor)].copy_(place)

    bucket.append_python_op(run_sub_buckets)
