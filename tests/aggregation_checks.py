"""Checks of an aggregation on one of several ranks, which may be threads or processes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devices import CPU
from torchbagua.compat.mlbench import Aggregation


class Mixed(nn.Module):
    """Parameters of every kind: a matrix, a number, several dtypes, channels last, with gaps, complex, tied, frozen.

    Some are on `device`.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw).to(device))

        self.matrix = parameter(5, 7, device=device)
        self.number = parameter()
        self.bf16 = parameter(3, 4, dtype=torch.bfloat16, device=device)
        self.f64 = parameter(6, dtype=torch.float64)
        self.c64 = parameter(2, 3, dtype=torch.complex64, device=device)
        self.last = nn.Parameter(parameter(2, 3, 4, 5).detach().to(memory_format=torch.channels_last))
        self.gaps = nn.Parameter(parameter(4, 6).detach()[:, ::2])
        self.tied = self.matrix
        self.frozen = nn.Parameter(parameter(3).detach(), requires_grad=False)
        self.unused = parameter(4)


def constant_model(rank: int) -> nn.Module:
    """Return the model of the issue: gradients and weights are (r + 1) (i + 1)."""
    model = nn.Linear(2, 2, bias=False)
    values = (rank + 1.0) * torch.arange(1.0, 5.0).view(2, 2)
    with torch.no_grad():
        model.weight.copy_(values)
    model.weight.grad = values.clone()
    return model


def random_gradients(model: nn.Module, rank: int) -> nn.Module:
    draw = torch.Generator().manual_seed(100 + rank)
    for name, weight in model.named_parameters():
        if weight.requires_grad and name != "unused" and not (name == "number" and rank == 0):
            weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=draw))
    return model


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_reference_values(rank: int, make: Callable[..., Aggregation]) -> None:
    """Check the reference values of an all-reduce between two ranks."""
    cases = [
        ("avg_world", None, [1.5, 3.0, 4.5, 6.0]),
        ("avg_custom", 4, [0.75, 1.5, 2.25, 3.0]),
        ("custom_avg", torch.tensor([4.0]), [0.75, 1.5, 2.25, 3.0]),
    ]
    for divide_before in (False, True):
        with make(divide_before=divide_before) as aggregation:
            for by_layer, (op, denom, expected) in itertools.product((False, True), cases):
                model = constant_model(rank)
                assert aggregation.agg_grad(by_layer=by_layer)(model, op=op, denom=denom) is None
                assert aggregation.agg_model(by_layer)(model, op, denom) is None
                assert model.weight.grad.flatten().tolist() == expected
                assert model.weight.flatten().tolist() == expected
            model = constant_model(rank)
            aggregation.agg_grad()(model, "avg_custom", 2.0 ** (rank + 1))  # ranks may have different denominators
            assert model.weight.grad[0, 0] == (1.0 if divide_before else 3 / 2 ** (rank + 1))
            model = constant_model(rank).half()
            aggregation.agg_grad()(model, "avg_custom", 2**17)  # exceeds the range of float16
            assert (model.weight.grad.double() * 2**17).flatten().tolist() == [3.0, 6.0, 9.0, 12.0]


def check_every_kind_of_parameter(
    rank: int, size: int, aggregation: Aggregation, *, by_layer: bool, device: torch.device = CPU
) -> None:
    """The mean is in place and bitwise exact. A gradient missing on one rank counts as zeros; on all, it stays None."""
    model = random_gradients(Mixed(device), rank)
    with torch.no_grad():
        model.frozen.fill_(rank)
        model.unused.fill_(rank)
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    places = [(tensor.data_ptr(), tensor.stride(), tensor.dtype) for tensor in tensors]
    aggregation.agg_grad(by_layer)(model, "avg_world")
    aggregation.agg_model(by_layer)(model, "avg_world")
    assert [(tensor.data_ptr(), tensor.stride(), tensor.dtype) for tensor in tensors] == places
    by_rank = [dict(random_gradients(Mixed(), other).named_parameters()) for other in range(size)]
    for name, parameter in model.named_parameters():
        if name in ("frozen", "unused"):
            assert parameter.grad is None
            assert bool((parameter == (size - 1) / 2).all())
            continue
        values = [
            real(torch.zeros_like(parameters[name]) if parameters[name].grad is None else parameters[name].grad)
            for parameters in by_rank
        ]
        wide = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]
        mean = sum(wide[1:], wide[0]).div(torch.tensor(float(size)))
        assert torch.equal(real(parameter.grad).cpu(), mean.to(values[0].dtype)), name


def check_bad_denominators(rank: int, aggregation: Aggregation) -> None:
    """Both ranks raise for a bad denominator on rank 1, send nothing, and can continue."""
    model = constant_model(rank)
    bad: list[Any] = [None, 0, torch.zeros(1), torch.ones(2), torch.tensor(1j), float("nan"), 10**400, "4"]
    for denom in bad:
        with pytest.raises(ValueError, match=r"not on rank 1|Denominator should be one element tensor") as error:
            aggregation.agg_grad()(model, "avg_custom", 4 if rank == 0 else denom)
        assert ("not on rank 1" in str(error.value)) == (rank == 0)
        assert torch.equal(model.weight.grad, model.weight)
    aggregation.agg_grad()(model, "avg_custom", 4)
    assert model.weight.grad[0, 0] == 0.75
