"""Chooses cases of a full product for `make test`: every pair of values occurs; other cases are marked slow."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of `axes`, the values of each argument."""
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
                marks=() if case in chosen else pytest.mark.release,
            )
            for case in cases
        ],
    )
