"""Each fenced block of README, CONTRIBUTING and docs separately: programs run, and commands are checked if possible.

`make test-docs` runs them. The output that a page shows for a program is not compared.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch.distributed.run

import programs
import warm_python
from documentation import FENCED, PAGES, ROOT, Block, blocks_of

# Programs with several processes run alongside other tests, on two cores.
LIMIT_S = 120

# A rank that exits immediately after a backward can abort in torch itself (2.13: a gloo thread that frees the
# all-reduce's context takes the GIL while the interpreter exits), with or without torchbagua.
LAST_LINE = re.compile(r"^( *)(dist\.destroy_process_group\(\))\s*\Z", re.MULTILINE)
ENDING = r"\1__import__('time').sleep(1)\n\1\2\n"


BLOCKS = [block for path in PAGES for block in blocks_of(path)]


def marker_of(block: Block) -> pytest.MarkDecorator:
    """Return the marker: blocks that state that they need other frameworks run in an environment that has these."""
    return pytest.mark.integrations if "# needs: pip install" in block.text else pytest.mark.docs


def cases(*languages: str) -> list[object]:
    """Return the blocks of these languages as test cases."""
    return [
        pytest.param(block, id=str(block), marks=marker_of(block))
        for block in BLOCKS
        if block.language in languages and not block.includes
    ]


def run_program(program: str, folder: Path) -> None:
    """Run a program with the command in its first line, or else as one process, in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "program.py"]
    if started := re.match(r"# ((?:\w+=\S* )*torchrun .*)\n", program):
        words = shlex.split(started[1])
        first = next(index for index, word in enumerate(words) if word == "torchrun")
        environment |= dict(word.split("=", 1) for word in words[:first])
        environment["PET_STANDALONE"] = (
            "1"  # as --standalone does: a separate port, because other tests run concurrently
        )
        command = [sys.executable, "-m", "torch.distributed.run", *words[first + 1 :]]
        if simple := re.fullmatch(r"torchrun --nproc-per-node=(\d) (\S+\.py)", " ".join(words[first:])):
            command = programs.forked_ranks(folder / simple[2], ranks=int(simple[1]))
    script = next(word for word in reversed(command) if str(word).endswith(".py"))
    (folder / script).parent.mkdir(parents=True, exist_ok=True)
    (folder / script).write_text(LAST_LINE.sub(ENDING, program), encoding="utf-8")
    with programs.ray_files() as of_ray:
        options = {"timeout_s": LIMIT_S, "cwd": folder, "env": {**environment, **of_ray}}
        if command[1] == "-m":  # torchrun, with more than the number of ranks
            programs.run(command, **options)
        else:
            warm_python.run(command[1:], **options)


def side_of_diff(diff: str, marker: str) -> str:
    """Return the old ("-") or the new ("+") side of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", marker) or line == "\n")


@pytest.mark.parametrize("block", cases("python"))
def test_program(block: Block, tmp_path: Path) -> None:
    run_program(block.text, tmp_path)


@pytest.mark.parametrize("side", ["-", "+"])
@pytest.mark.parametrize("block", cases("diff"))
def test_diff(block: Block, side: str, tmp_path: Path) -> None:
    program = side_of_diff(block.text, side)
    assert ("torchbagua" in program) == (side == "+")
    run_program(program, tmp_path)


@pytest.mark.parametrize("block", cases("sh", "bash"))
def test_commands(block: Block) -> None:
    """The commands and their arguments exist. Other tests cover their effects."""
    programs.run(["bash", "-n", "-c", block.text])
    if block.language == "sh":
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                check_command(*words)


def check_command(program: str, *arguments: str) -> None:
    """Fail if a program that is known here would refuse these arguments."""
    if program == "make":
        programs.run(["make", "--dry-run", *arguments], cwd=ROOT)
    elif program == "torchrun":
        torch.distributed.run.get_args_parser().parse_args(arguments)
    elif program == "torchbagua":
        warm_python.run(["-m", "torchbagua.cli", *arguments, "--help"], cwd=ROOT)
    elif (program, *arguments[:1]) == ("pip", "install"):
        dry = ["--dry-run", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
        programs.run([sys.executable, "-m", "pip", *arguments, *dry], timeout_s=200, cwd=ROOT)
    elif program in ("python", ".venv/bin/python"):
        assert (ROOT / arguments[0]).is_file()
    else:  # other programs; tests/test_tutorials.py runs the unshare commands
        assert program in ("export", "tensorboard", "unshare"), program


def test_every_block_has_a_known_language() -> None:
    """Languages that are not tested make no claims: printed output, diagrams, configuration files."""
    tested, untested = {"python", "diff", "sh", "bash"}, {"text", "mermaid", "yaml", "toml", "json"}
    assert [str(block) for block in BLOCKS if block.language not in tested | untested] == []


def test_included_files_exist_and_are_tested() -> None:
    included = [name for block in BLOCKS for name in block.includes]
    assert [name for name in included if not (ROOT / name).is_file() or not name.startswith("tutorials/")] == []


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by the rules of GitHub and of Python-Markdown."""
    headings = re.findall(r"^#+ +(.*?)(?: *\{ *#[\w.-]+ *\})?$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    given = re.findall(r"\{ *#([\w.-]+) *\}", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {
        *given,
        *(heading.replace(" ", "-") for heading in plain),
        *(re.sub(r"[-\s]+", "-", heading) for heading in plain),
    }


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_have_targets(page: str) -> None:
    """`make docs` checks the links of the pages in docs."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = ROOT / name if name else ROOT / page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in slugs(target)):
            broken.append(link)
    assert broken == []
