"""The mutants of `make mutants` fit today's sources; whether tests find them takes hours, and is not tested here."""

import pytest

from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_still_compiles(mutant: Mutant) -> None:
    source = mutant.source()
    assert source != (ROOT / mutant.path).read_text(encoding="utf-8")
    if mutant.path.suffix == ".py":
        compile(source, mutant.file, "exec")


def test_every_package_of_the_core_has_mutants_with_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    core = ["transport", "collectives", "codecs", "native", "runtime", "algorithms", "training", "fsdp", "observe"]
    assert list(dict.fromkeys(mutant.package for mutant in MUTANTS)) == core
    assert all(mutant.name.isidentifier() and mutant.name.islower() for mutant in MUTANTS)
