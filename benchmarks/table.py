"""Tables in Markdown."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. A column whose cells begin with numbers, where they are not empty, is aligned to the right."""
    body = list(rows)
    columns = zip(*body, strict=True) if body else [()] * len(head)
    rule = ["---:" if _is_of_numbers(column) else "---" for column in columns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def _is_of_numbers(column: Sequence[str]) -> bool:
    return any(column) and all(re.match(r"[-+]?\d|$", cell) for cell in column)
