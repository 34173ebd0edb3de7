"""Every block of the README runs: the Python ones as one script over two processes, the shell ones as dry runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import programs
import torchbagua.cli.__main__

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
# The first example, whose two sides are plain torch and torchbagua.
(DIFF,) = (text for language, text in BLOCKS if language == "diff")


# A rank that ends at once after a backward can abort in torch itself (2.13: a gloo thread that frees the all-reduce's
# context asks for the interpreter's lock while the interpreter ends), with or without torchbagua.
LAST_LINE = "dist.destroy_process_group()\n"
ENDING = f"\nimport time\ntime.sleep(1)\n{LAST_LINE}"


def side_of_diff(diff: str, marker: str) -> str:
    """Return the old ("-") or the new ("+") side of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", marker) or line == "\n")


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = [text for language, text in BLOCKS if language == "python"]
    script = tmp_path / "train.py"
    setting = side_of_diff(DIFF, "+").replace(LAST_LINE, "")  # the blocks go on where the script ends
    script.write_text("\n".join([setting, *python]) + ENDING)
    output = programs.run(programs.torchrun(script), cwd=tmp_path).stdout
    assert len(re.findall(r"\d+ bytes sent by this rank; the first event: ", output)) == 2
    assert len(re.findall(r"ByteGradAlgorithm\(.*\), 2 ranks", output)) == 2, "a table on each rank"
    monkeypatch.chdir(tmp_path)
    for line in TRACE_LINES:
        program, *arguments = shlex.split(line)
        if program == "torchbagua":
            assert torchbagua.cli.__main__.main(arguments) == 0
        else:
            assert program == "tensorboard"
            programs.run([str(Path(sys.executable).with_name(program)), *arguments, "--inspect"])  # and not serve
    assert {"timeline.png", "merged.json.gz"} <= {path.name for path in (tmp_path / "runs" / "train").iterdir()}


@pytest.mark.slow
def test_what_the_diff_begins_with_runs_without_torchbagua(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    plain = side_of_diff(DIFF, "-")
    assert "torchbagua" not in plain
    script.write_text(plain.replace(LAST_LINE, ENDING))
    programs.run(programs.torchrun(script), cwd=tmp_path)


SHELL = "".join(text for language, text in BLOCKS if language == "sh")
SHELL_LINES = [line.partition("#")[0].strip() for line in SHELL.splitlines() if line]


# What is traced in the Python block above these.
TRACE_LINES = [line for line in SHELL_LINES if "runs/train" in line]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if line.startswith("pip") else ())
        for line in SHELL_LINES
        if line not in TRACE_LINES
    ],
)
def test_shell_blocks(line: str) -> None:
    """Commands exist as written; what they do is tested where they are."""
    program, *arguments = shlex.split(line)
    if program == "make":
        command = ["make", "--dry-run", *arguments]
    elif program == "torchbagua":
        command = [str(Path(sys.executable).with_name("torchbagua")), *arguments]
    else:
        assert program == "pip"
        command = [sys.executable, "-m", "pip", *arguments, "--dry-run", "--no-deps", "--no-build-isolation", "--quiet"]
    programs.run(command, timeout_s=200, cwd=ROOT)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
