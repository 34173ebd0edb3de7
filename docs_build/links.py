"""Turns names in docstrings into links: the reference links `attach`, in backticks in the source, to its entry."""

import re
from typing import Any

import griffe

NAME = re.compile(r"(?<![\[`])`([A-Za-z_][\w.]*)`(?!`)")
# Submodules with names that docstrings use without their paths. A module precedes the modules that import its names.
PUBLIC_MODULES = (
    "codecs",
    "collectives.topology",
    "observe",
    "extend",
    "algorithms",
)


class Links(griffe.Extension):
    """A griffe extension; griffe parses the package for the reference."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Process all docstrings."""
        modules = [pkg, *(pkg[name] for name in PUBLIC_MODULES)]
        self.public = {name: f"{module.path}.{name}" for module in reversed(modules) for name in module.members}
        self.visit(pkg)

    def visit(self, place: griffe.Object) -> None:
        """Insert links into the docstrings of an object and of its members."""
        if place.docstring:
            place.docstring.value = NAME.sub(lambda found: self.link(found[1], place), place.docstring.value)
        for member in place.members.values():
            if not member.is_alias:
                self.visit(member)

    def link(self, name: str, place: griffe.Object) -> str:
        """Return a reference to what `name` means in the docstring of `place`, or plain code if it means no object."""
        cls = place if place.is_class else place.parent
        first, _, rest = name.partition(".")
        if place.is_function and first in {parameter.name for parameter in place.parameters}:
            return f"`{name}`"
        if cls is not None and cls.is_class and name in cls.all_members and not name.startswith("_"):
            path = f"{cls.path}.{name}"
        elif first in self.public:
            path = self.public[first] + (f".{rest}" if rest else "")
        elif name.startswith("torchbagua."):
            path = name
        else:
            return f"`{name}`"
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'
