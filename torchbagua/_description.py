"""Values as text that is the same in every process: what ranks compare, and what states and traces write down."""

import dataclasses
import functools
import sys
from types import BuiltinFunctionType, FunctionType, MethodType

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
# In the repr of what has none of its own: threads share it, processes do not.
_ADDRESS = " at 0x"


def describe(value: object, owner: str) -> str:
    """Return the repr of `value`, in which functions stand by their qualified names, and not by an address.

    Args:
        value: also a list, tuple, dict or dataclass with functions in it.
        owner: what an error says that it must have such a name.

    Raises:
        TypeError: a function that cannot be imported by its name, a lambda for instance, or an object whose repr is
            its address.
    """
    text = repr(value)
    if _ADDRESS not in text or isinstance(value, str):
        return text
    if isinstance(value, _FUNCTIONS):
        return qualified_name(value, owner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        parts = [f"{name}={describe(getattr(value, name), owner)}" for name in shown]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if type(value) is list:
        return f"[{', '.join(describe(one, owner) for one in value)}]"
    if type(value) is tuple:
        return f"({', '.join(describe(one, owner) for one in value)}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return f"{{{', '.join(f'{describe(key, owner)}: {describe(one, owner)}' for key, one in value.items())}}}"
    raise TypeError(f"{owner} must have a repr that is the same on all ranks, as that of a dataclass is, got {text}")


def qualified_name(function: object, owner: str) -> str:
    """Return the module and name by which `function` can be imported; raise TypeError, about `owner`, without."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[str(module)])
    except (AttributeError, KeyError):
        found = None
    if found != function:
        raise TypeError(
            f"{owner} must be a function with a name of its own in a module, by which ranks compare it and traces show "
            f"it, and no lambda, partial or function within another, got {function!r}"
        )
    return f"{module}.{name}"
