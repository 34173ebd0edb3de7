"""Values as text that is the same in every process: ranks compare it, and states and traces record it."""

import dataclasses
import functools
import sys
from types import BuiltinFunctionType, FunctionType, MethodType

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
# Part of the default repr of an object. The address is the same for all threads, but differs between processes.
_ADDRESS = " at 0x"


def stable_repr(value: object, owner: str) -> str:
    """Return the repr of `value`, with the qualified names of functions instead of their addresses.

    Args:
        value: any object, also a list, tuple, dict or dataclass that contains functions.
        owner: the name of `value` in error messages.

    Raises:
        TypeError: `value` is a function that cannot be imported by its name, such as a lambda, or an object with an
            address in its repr.
    """
    text = repr(value)
    if _ADDRESS not in text or isinstance(value, str):
        return text
    if isinstance(value, _FUNCTIONS):
        return qualified_name(value, owner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        parts = [f"{name}={stable_repr(getattr(value, name), owner)}" for name in shown]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if type(value) is list:
        return f"[{', '.join(stable_repr(item, owner) for item in value)}]"
    if type(value) is tuple:
        return f"({', '.join(stable_repr(item, owner) for item in value)}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return (
            f"{{{', '.join(f'{stable_repr(key, owner)}: {stable_repr(item, owner)}' for key, item in value.items())}}}"
        )
    raise TypeError(f"{owner} must have a repr that is the same on all ranks, as a dataclass has, got {text}")


def qualified_name(function: object, owner: str) -> str:
    """Return the name by which `function` can be imported, with its module.

    Raises:
        TypeError: there is none; the message names `owner`.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[str(module)])
    except (AttributeError, KeyError):
        found = None
    if found != function:
        raise TypeError(
            f"{owner} must be a function that can be imported by its name, not a lambda, partial or nested function, "
            f"got {function!r}; ranks compare it by this name, and traces show the name"
        )
    return f"{module}.{name}"
