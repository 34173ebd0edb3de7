"""Writes the documentation's lists of algorithms and codecs, from their registries: `make tables`.

Each list is between two markers of a file: the table of all algorithms, entries in the reference, and pages in the
navigation. A new algorithm needs a page: a file in docs/algorithms with an introduction that links to the algorithm's
class in the reference.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import torchbagua as tb
from markers import fill
from torchbagua import codecs
from torchbagua.algorithms.base import get, init_for
from torchbagua.codecs.base import REGISTRY
from torchbagua.fsdp.collectives import shard_codecs

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "algorithms"
PROGRAM = "docs_build/tables.py"  # as markers name it


@dataclass(frozen=True)
class Entry:
    """A registered name, and its algorithm with default arguments."""

    name: str
    description: str | None
    algorithm: tb.Algorithm

    @property
    def class_name(self) -> str:
        """The name of the algorithm's class, which `torchbagua` exports."""
        return type(self.algorithm).__name__

    @property
    def page(self) -> str:
        """The file of docs/algorithms with an introduction that links to the class."""
        link = f"[torchbagua.{self.class_name}]"
        introductions = {path.name: path.read_text("utf-8").split("\n## ")[0] for path in sorted(PAGES.glob("*.md"))}
        found = [name for name, introduction in introductions.items() if link in introduction]
        if len(found) != 1:
            raise ValueError(
                f"{self.class_name}: exactly one page in docs/algorithms must have {link} in its introduction, got "
                f"{' and '.join(found) or 'none'}"
            )
        return found[0]

    @property
    def codec(self) -> str:
        """The codec that the algorithm uses by default."""
        codec = type(self.algorithm.make_codec())
        if codec is codecs.Identity:
            return "full precision"
        return (
            f"[`{codec.__name__}`][torchbagua.codecs.{codec.__name__}]"
            if codec.__name__ in codecs.__all__
            else "algorithm-specific"
        )

    @property
    def error_feedback(self) -> str:
        """Whether the algorithm stores residuals."""
        used = getattr(self.algorithm, "error_feedback", False)
        if any(field.name == "error_feedback" for field in dataclasses.fields(self.algorithm)):  # type: ignore[arg-type]
            return "by default" if used else "optional"
        return "always" if used else "no"

    @property
    def sharded_modules(self) -> str:
        """Whether the algorithm supports modules on which fully_shard was called."""
        if self.algorithm.averages_weights:
            return "between replicas"
        try:
            shard_codecs("tables", self.algorithm)
        except ValueError:
            return "no"
        return "yes"


def entries() -> list[Entry]:
    """Return the package's own algorithms, gradient algorithms first."""
    adam = tb.QAdamOptimizer([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, warmup_steps=1)
    found = [
        Entry(name, description, init_for(name, [adam]))
        for name, description in tb.available_algorithms().items()
        if get(name).__module__.startswith("torchbagua.algorithms.")
    ]
    return sorted(found, key=lambda entry: entry.algorithm.averages_weights)


def algorithms() -> str:
    """The table of docs/algorithms/index.md."""
    lines = [
        "| algorithm | name | it averages | codec, by default | error feedback | `hierarchical` | sharded modules | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries():
        cells = (
            f"[`{entry.class_name}`]({entry.page})",
            f'`"{entry.name}"`',
            "weights" if entry.algorithm.averages_weights else "gradients",
            entry.codec,
            entry.error_feedback,
            "yes" if hasattr(entry.algorithm, "hierarchical") else "no",
            entry.sharded_modules,
            entry.description or "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def algorithm_entries() -> str:
    """The entries of docs/api/algorithms.md: each class with the public methods that no base class has."""
    blocks = []
    for kind in dict.fromkeys(type(entry.algorithm) for entry in entries()):
        members = [
            name
            for name, value in vars(kind).items()
            if not name.startswith("_")
            and (callable(value) or isinstance(value, property))
            and not any(hasattr(base, name) for base in kind.__bases__)
        ]
        shown = f"[{', '.join(members)}]" if members else "false"
        blocks.append(f"::: torchbagua.{kind.__name__}\n    options:\n      members: {shown}\n")
    return "\n" + "\n".join(blocks) + "\n"


def algorithm_names() -> str:
    """The classes in docs/api/index.md, which lists every public name."""
    names = dict.fromkeys(entry.class_name for entry in entries())
    return ", ".join(f"[`{name}`][torchbagua.{name}]" for name in names)


def algorithm_pages() -> str:
    """The pages in zensical.toml."""
    return "".join(f'        "algorithms/{page}",\n' for page in dict.fromkeys(entry.page for entry in entries()))


def codec_classes() -> list[str]:
    """Return the class names of the codecs that the package registers, and of full precision."""
    made = [make() for make in REGISTRY.values() if make.__module__.startswith("torchbagua.codecs.")]
    return list(dict.fromkeys(type(codec).__name__ for codec in [*made, codecs.Identity()]))


def codec_entries() -> str:
    """The entries of docs/api/compressors.md."""
    options = "    options:\n      heading_level: 3\n      members: false\n"
    return "\n" + "\n".join(f"::: torchbagua.codecs.{name}\n{options}" for name in codec_classes()) + "\n"


def codec_names() -> str:
    """The codecs in docs/api/index.md."""
    return ", ".join(f"[`{name}`][torchbagua.codecs.{name}]" for name in codec_classes())


LISTS: Sequence[Callable[[], str]] = (
    algorithms,
    algorithm_entries,
    algorithm_names,
    algorithm_pages,
    codec_entries,
    codec_names,
)
FILES = (
    "docs/algorithms/index.md",
    "docs/api/algorithms.md",
    "docs/api/compressors.md",
    "docs/api/index.md",
    "zensical.toml",
)


def updated(name: str) -> str:
    """Return the text that the file `name`, below the root, should have."""
    parts = {make.__name__: make for make in LISTS}
    return fill((ROOT / name).read_text("utf-8"), PROGRAM, parts)


def main() -> None:
    """Write each file with a list that is not up to date."""
    for name in FILES:
        text = updated(name)
        if text != (ROOT / name).read_text("utf-8"):
            (ROOT / name).write_text(text, "utf-8")
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
