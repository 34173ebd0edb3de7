"""Tables in Markdown."""

import re
from collections.abc import Iterable, Sequence

MISSING = "\N{EN DASH}"  # a number that was not measured


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    A column is aligned to the right if its cells begin with numbers, bold or not, or are empty or MISSING.
    """
    body = list(rows)
    columns = zip(*body, strict=True) if body else [()] * len(head)
    rule = ["---:" if _is_of_numbers(column) else "---" for column in columns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def _is_of_numbers(column: Sequence[str]) -> bool:
    return any(column) and all(re.match(rf"(?:\*\*)?[-+]?\d|{MISSING}?$", cell) for cell in column)
