"""A table of text, for the terminal."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, num_head_rows: int = 1, num_left: int = 1, gap: int = 2) -> str:
    """Return columns as wide as their longest cell, with a line under the head.

    Args:
        rows: of equally many cells; those of the head come first.
        num_head_rows: how many those are.
        num_left: so many columns, from the first, are aligned to the left, the others to the right.
        gap: blanks between two columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[num_left:], widths[num_left:], strict=True)]
        lines.append((" " * gap).join(cells).rstrip())
    lines.insert(num_head_rows, "-" * max(map(len, lines)))
    return "\n".join(lines)
