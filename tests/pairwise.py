"""Which cases of a full product run in `make test`: so many that every two values meet; the others are marked slow."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrises a test with all combinations of `axes`, values by argument."""
    cases = list(itertools.product(*(range(len(values)) for values in axes.values())))

    def pairs_of(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs_of, cases))
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        chosen.add(best)
        missing -= pairs_of(best)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(values[index] for values, index in zip(axes.values(), case, strict=True)),
                marks=() if case in chosen else pytest.mark.slow,
            )
            for case in cases
        ],
    )
