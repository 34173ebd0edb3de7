"""The pages' figures equal those of the recorded runs, which a single rule chooses and merges."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from documentation import PAGES as ALL_PAGES
from documentation import ROOT

sys.path += [str(ROOT / "docs_build"), str(ROOT / "benchmarks")]
import figure_texts as texts
import figures
import markers
import released
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


def test_each_part_is_on_one_page() -> None:
    parts = {
        page.relative_to(ROOT).as_posix(): [
            found["name"] for found in markers.pattern(figures.PROGRAM).finditer(page.read_text(encoding="utf-8"))
        ]
        for page in ALL_PAGES
    }
    made = [make.__name__ for make in (*figures.PARTS, *figures.HORIZON_PARTS)]
    assert sorted(name for names in parts.values() for name in names) == sorted(made)
    assert sorted(page for page, names in parts.items() if names) == sorted(figures.PAGES)


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


def record(
    revision: str = "a", *, hour: int = 0, minute: int = 40, step_ms: float = 100.0, **row: Any
) -> dict[str, Any]:
    """Return a record as network.py writes it, with one network and one contestant."""
    return {
        "environment": {"git_revision": revision, "date_utc": f"2026-11-25T{hour:02}:{minute}:00+00:00"},
        "networks": [
            {
                "title": "200mbit",
                "rank_rate": "200mbit",
                "num_ranks": 4,
                "rows": [{"contestant": "ddp", "label": "DDP float32", "step_ms": step_ms, **row}],
            }
        ],
    }


def test_merged_runs_have_the_median_and_the_range() -> None:
    runs = [
        record(step_ms=step_ms, speedup_quartiles=[0, speedup, 9], floor_ms=50.0, link_bytes=None)
        for step_ms, speedup in ((120.0, 2.0), (100.0, 4.0), (110.0, 3.0))
    ]
    runs[0]["networks"][0]["rows"][0]["schedule_floor_ms"] = 60.0
    row = released.merge(["1", "2", "3"], runs).networks["200mbit"].rows["ddp"]
    assert row.numbers == {
        "step_ms": released.Number(110.0, 100.0, 120.0),
        "speedup": released.Number(3.0, 2.0, 4.0),
        "floor_ms": released.Number(50.0, 50.0, 50.0),
    }, "numbers that a run lacks are left out"


def test_runs_of_two_revisions_or_settings_are_not_merged() -> None:
    with pytest.raises(ValueError, match=r"1, 2: runs must be of one revision and machine, got .*'a'.* and .*'b'"):
        released.merge(["1", "2"], [record("a"), record("b")])
    other = record("a")
    other["networks"][0]["num_ranks"] = 2
    with pytest.raises(ValueError, match="1, 2: runs must have the same settings and contestants"):
        released.merge(["1", "2"], [record("a"), other])


def test_the_newest_three_runs_of_one_revision_in_different_hours_are_chosen(tmp_path: Path) -> None:
    def add(name: str, run: dict[str, Any]) -> None:
        (tmp_path / f"figures-{name}.json").write_text(json.dumps(run), encoding="utf-8")

    for hour in range(3):
        add(f"0{hour}", record("old", hour=hour))
    assert released.newest_runs(tmp_path) == ["figures-00.json", "figures-01.json", "figures-02.json"]
    add("10", record("new", hour=10))
    add("11", record("new", hour=11))
    add("12", record("new", hour=11, minute=50))
    for hour in range(3):
        add(f"13-{hour}", record("new-dirty", hour=hour))
    other = record("new", hour=14)
    other["networks"][0]["num_ranks"] = 2
    add("14", other)
    assert released.newest_runs(tmp_path) == ["figures-00.json", "figures-01.json", "figures-02.json"]
    add("15", record("new", hour=15))
    assert released.newest_runs(tmp_path) == ["figures-10.json", "figures-12.json", "figures-15.json"]
    add("16", record("new", hour=16))
    assert released.newest_runs(tmp_path) == ["figures-12.json", "figures-15.json", "figures-16.json"]
    for path in tmp_path.glob("figures-0*.json"):
        path.unlink()
    for path in tmp_path.glob("figures-1[0-5]*.json"):
        path.unlink()
    assert released.newest_runs(tmp_path) is None
