"""The workflows of GitHub: they call targets of the Makefile, and use actions pinned by commit."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from documentation import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"\$\((\w+)\)", MAKEFILE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())

RUN = re.compile(
    r" *(?:- )?run: make(?P<targets>(?: [a-z-]+)+)(?P<variables>(?: \w+=(?:[\w.]+|\$\{\{ matrix\.\w+ \}\}))*)"
)
USES = re.compile(r" *(?:- )?uses: (?P<action>[\w-]+/[\w-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def problems(workflow: str) -> Iterator[str]:
    """Yield what is wrong with the `run` and `uses` lines of a workflow."""
    for line in workflow.splitlines():
        if re.match(" *#", line):
            continue
        if re.search(r"\brun\b\W*:", line):
            if call := RUN.fullmatch(line):
                yield from (f"no target {name}" for name in call["targets"].split() if name not in TARGETS)
                yield from (f"no variable {name}" for name in re.findall(r"(\w+)=", line) if name not in VARIABLES)
            else:
                yield f"not a call of make: {line.strip()}"
        if re.search(r"\buses\b\W*:", line) and not USES.fullmatch(line):
            yield f"not pinned by commit, with its version: {line.strip()}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_and_pins_actions(path: Path) -> None:
    workflow = path.read_text(encoding="utf-8")
    assert RUN.search(workflow)
    assert list(problems(workflow)) == []


def test_all_workflows_use_the_same_version_of_an_action() -> None:
    pins = {found for path in WORKFLOWS for found in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))}
    actions = [pin.partition("@")[0] for pin in pins]
    assert sorted(set(actions)) == sorted(actions)


def test_the_workflow_of_a_pull_request_runs_the_same_targets_as_ci() -> None:
    (call,) = re.findall(r"^exec (make .*) </dev/null$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    assert f"- run: {call}\n" in (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
