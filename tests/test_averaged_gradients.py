"""Which gradients contain an average: flags that a GPU computes without a read equal the values that the host reads."""

import itertools

import pytest
import torch

from torchbagua.runtime.averaged_gradients import has_average, parameters_with_average

VALUES = {
    "zeros": torch.zeros(6),
    "negative zeros": torch.full((6,), -0.0),
    "the first": torch.tensor([2.0, 0, 0, 0, 0, 0]),
    "the last": torch.tensor([0, 0, 0, 0, 0, 1e-45]),
    "NaN": torch.tensor([0, torch.nan, 0, 0, 0, 0]),
}
SHAPES = {"vector": (6,), "matrix": (2, 3), "transposed": (3, 2), "every other": (3,), "number": ()}


def in_shape(values: torch.Tensor, shape: str) -> torch.Tensor:
    if shape == "transposed":
        return values.view(2, 3).t()
    if shape == "every other":
        return values[1::2]
    return values[-1] if shape == "number" else values.view(SHAPES[shape])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_device_flags_equal_the_hosts_reads(dtype: torch.dtype) -> None:
    averages = {}
    for shape, gradient, average in itertools.product(SHAPES, VALUES.values(), VALUES.values()):
        parameter = torch.zeros(SHAPES[shape], dtype=dtype, requires_grad=True)
        parameter.grad = in_shape(gradient.to(dtype), shape)
        averages[parameter] = average[: max(1, parameter.numel())]
    read = set(map(id, parameters_with_average(averages)))

    found = has_average(averages)

    assert {id(parameter) for parameter, flag in found.items() if flag} == read
    assert 0 < len(read) < len(averages)
    assert all(flag.dim() == 0 and flag.dtype == torch.bool for flag in found.values())
