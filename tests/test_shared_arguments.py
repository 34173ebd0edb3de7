"""Arguments that several classes have: each means one thing, and has one default."""

import inspect
from collections.abc import Callable
from typing import Any

import torchbagua as tb
from torchbagua.algorithms.base import get

CONSTRUCTORS = [get(name) for name in tb.available_algorithms()]
METHODS = [
    method
    for cls in (tb.extend.BaguaBucket, tb.BaguaProcessGroup)
    for _, method in inspect.getmembers(cls, inspect.isfunction)
]


def defaults_of(argument: str, functions: list[Callable[..., Any]]) -> dict[str, Any]:
    """Return the defaults of this argument, by the names of the functions that have it."""
    parameters = {function.__qualname__: inspect.signature(function).parameters for function in functions}
    return {name: own[argument].default for name, own in parameters.items() if argument in own}


def test_hierarchical_is_true_by_default() -> None:
    """Except where the backend's all-reduce handles nodes."""
    defaults = defaults_of("hierarchical", [*CONSTRUCTORS, *METHODS])
    assert {"GradientAllReduceAlgorithm", "BaguaProcessGroup.all_reduce"} <= defaults.keys()
    assert not defaults.pop("GradientAllReduceAlgorithm")
    assert set(defaults.values()) == {True}, defaults
