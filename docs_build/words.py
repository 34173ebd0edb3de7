"""Checks that pages, docstrings and comments use one term for each concept: `python docs_build/words.py`.

docs/glossary.md defines the terms. Code and identifiers in backticks are not checked.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md")
PROGRAMS = ("torchbagua/**/*.py", "tutorials/*.py")

# Words to avoid, and the term of the glossary or of the field.
TERMS = {
    r"travel(?:s|ed|ing)?": "send, communicate",
    r"add(?:s|ed|ing)? up": "sum, reduce",
    r"st(?:and|ands|ood|anding) still": "freeze, block",
    r"hear(?:s|d)? of|(?:is|are|be|was|were) told of": "is notified of",
    r"hand(?:s|ed|ing)? over": "pass",
    r"to the bit|bit for bit": "bitwise",
    r"without a word": "silently",
    r"let(?:s|ting)? go": "release, drop",
    r"anew": "again",
    r"goes? together": "work together",
    r"on (?:its|their) way": "in flight",
    r"own chunks?": "local chunk",
    r"(?:is|are|was|were) gone": "died, disconnected, closed",
    r"what (?:is|was) left out|left-over|remainders?": "residual",
    r"(?-i:compressors?)": "codec",  # the class is a name
    r"neighbours?": "neighbor",
    r"plain hook": "standalone hook",
    r"set free": "unfrozen",
    r"several nodes of several ranks": "multi-node",
}
FORBIDDEN = {
    re.compile(rf"(?<![\w.`/-])(?:{pattern})(?![\w`/-]|\.\w)", re.IGNORECASE): term for pattern, term in TERMS.items()
}


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are neither code nor formulas, by their numbers, without inline code and links."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "$$")) and line.count("$$") != 2:
            is_code = not is_code
        elif not is_code and not line.startswith(":::"):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|\]\[[^\]]*\]|\$[^$]*\$|<!--.*?-->", " ", line)


def prose_of_program(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings, by their numbers, without inline code and names of arguments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", " ", token.string)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines(), node.lineno):
                yield number, re.sub(r"`[^`]*`|^ *\w+(?:, \w+)*:", " ", line)


def uses(line: str) -> Iterator[tuple[str, str]]:
    """Yield each forbidden word of a line of prose, and what to write."""
    for forbidden, term in FORBIDDEN.items():
        for found in forbidden.finditer(line):
            yield found[0], term


def problems() -> Iterator[str]:
    """Yield each use of a forbidden word: file, line, the word, and the term to write."""
    for patterns, prose in ((PAGES, prose_of_page), (PROGRAMS, prose_of_program)):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            for number, line in prose(path.read_text("utf-8")):
                for word, term in uses(line):
                    yield f"{path.relative_to(ROOT)}:{number}: {word!r}; write {term}"


def main() -> int:
    """Print all problems. Returns 1 if any exist."""
    found = list(problems())
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
