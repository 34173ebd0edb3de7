"""The parts of pages that programs generate, between `<!-- made by PROGRAM: NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Callable, Mapping


def pattern(program: str) -> re.Pattern[str]:
    """Return a pattern that matches a part that `program` generates. The markers are Markdown or TOML comments."""
    return re.compile(
        rf"(?<=made by {re.escape(program)}: )(?P<name>\w+)(?P<comment_end>(?: -->)?\n?).*?(?=[ ]*(?:#|<!--) end)",
        re.DOTALL,
    )


def fill(text: str, program: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return `text` with every part of `program` regenerated. Raises KeyError if a marker names no part."""
    return pattern(program).sub(lambda found: found["name"] + found["comment_end"] + parts[found["name"]](), text)
