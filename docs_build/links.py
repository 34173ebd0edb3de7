"""Makes names in docstrings links: of `attach` in backticks, as the source has it, the reference makes a link to it."""

import re
from typing import Any

import griffe

NAME = re.compile(r"(?<![\[`])`([A-Za-z_][\w.]*)`(?!`)")
# Below the package: modules whose names a docstring gives without their paths.
# Each stands before those that import its names.
PUBLIC_MODULES = (
    "codecs",
    "collectives.topology",
    "observe",
    "runtime.parameter_state",
    "runtime.weight_bucket",
    "runtime.lockstep",
    "runtime.weight_means",
    "runtime.weight_buckets",
    "algorithms",
    "algorithms.gradient.feedback",
)


class Links(griffe.Extension):
    """An extension of griffe, which reads the package for the reference."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Go through all docstrings."""
        modules = [pkg, *(pkg[name] for name in PUBLIC_MODULES)]
        self.public = {name: f"{module.path}.{name}" for module in reversed(modules) for name in module.members}
        self.visit(pkg)

    def visit(self, one: griffe.Object) -> None:
        """Make links in the docstring of an object, and in those of its members."""
        if one.docstring:
            one.docstring.value = NAME.sub(lambda found: self.link(found[1], one), one.docstring.value)
        for member in one.members.values():
            if not member.is_alias:
                self.visit(member)

    def link(self, name: str, place: griffe.Object) -> str:
        """Return a reference to what `name` means in the docstring of `place`; it stays text where there is none."""
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
