"""The fenced blocks of README, CONTRIBUTING and docs, and what the programs among them define."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: below the root.
        line: where its text begins.
        language: what stands behind the fence.
        text: without the page's indentation.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def includes(self) -> list[str]:
        """The files that it consists of, where it is no text of its own."""
        return re.findall(r"^-+8<-+ \"([^\":]+)", self.text, re.MULTILINE)


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page."""
    page = path.read_text(encoding="utf-8")
    return [
        Block(
            path.relative_to(ROOT),
            page.count("\n", 0, found.start("text")) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
        )
        for found in FENCED.finditer(page)
    ]


def names_in(page: str, wanted: str, *, module: str) -> dict[str, Any]:
    """Return what the program on a page of docs defines that has `wanted` in it; it is not run as a program.

    Args:
        page: below docs.
        wanted: in one program of the page alone.
        module: whose the names are from then on.
    """
    (program,) = [block for block in blocks_of(ROOT / "docs" / page) if wanted in block.text]
    names: dict[str, Any] = {"__name__": module}
    exec(compile(program.text, str(program), "exec"), names)
    return names
