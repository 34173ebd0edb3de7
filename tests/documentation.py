"""The fenced blocks of README, CONTRIBUTING and docs, and the names that the programs among them define."""

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
    """A fenced block."""

    page: Path  # below the root
    line: int  # where its text begins
    language: str
    text: str  # without the page's indentation

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def includes(self) -> list[str]:
        """The files that it includes instead of containing text."""
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
    """Return the names that the only program with `wanted` on a page of docs defines; they belong to `module`."""
    (program,) = [block for block in blocks_of(ROOT / "docs" / page) if wanted in block.text]
    names: dict[str, Any] = {"__name__": module}
    exec(compile(program.text, str(program), "exec"), names)
    return names
