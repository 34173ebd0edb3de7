"""Text tables for the terminal."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, num_head_rows: int = 1, num_left: int = 1, gap: int = 2) -> str:
    """Return a table with columns as wide as their longest cell, and a line below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[num_left:], widths[num_left:], strict=True)]
        lines.append((" " * gap).join(cells).rstrip())
    lines.insert(num_head_rows, "-" * max(map(len, lines)))
    return "\n".join(lines)
