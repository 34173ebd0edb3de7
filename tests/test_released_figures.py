"""The pages' figures equal those of the recorded runs, which a single rule chooses and merges."""

import sys
from typing import Any

import pytest

from documentation import ROOT

sys.path += [str(ROOT / "docs_build"), str(ROOT / "benchmarks")]
import figure_texts as texts
import figures
from contestants import COMPUTE_ONLY, CONTESTANTS
from horizon_report import summarise_row

ADVICE = "run `make bench-docs ARGS=--write`"


@pytest.fixture(scope="module")
def shown() -> Any:
    return figures.load_shown()


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_its_records(name: str, shown: Any) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == figures.updated(name, shown), ADVICE


def test_charts_have_the_figures_of_their_records(shown: Any) -> None:
    assert [path.name for path, svg in figures.charts(shown) if path.read_bytes() != svg] == [], ADVICE


def test_readme_has_the_losses_of_diloco_with_muon() -> None:
    summary = summarise_row(figures.load_horizon(), "muon_diloco_30")
    assert summary is not None
    losses = (
        f"loss {summary.over_adamw:+.1f}\u00a0% compared with DDP and AdamW, "
        f"{summary.over_same:+.1f}\u00a0% compared with DDP and Muon"
    )
    assert losses in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_have_every_contestant_of_a_run() -> None:
    tables = {*texts.GRADIENTS, *texts.MOMENTA, *texts.WEIGHTS, *texts.NODES}
    measured = {name for name, contestant in CONTESTANTS.items() if not contestant.must_be_named}
    assert tables == measured - {COMPUTE_ONLY}
