"""Makes a release from the working tree: changelog, version, saved states, wheels, a commit and a tag.

    python release/release.py 0.1.0 [--owner NAME]

Pushes nothing, and needs a network only for pip. Prints a checklist of what it did, and of what is left to do.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where the owner of the repository on GitHub is not known yet.
PLACEHOLDER = re.compile(r"(?<=github\.com/)OWNER(?=/torchbagua)|OWNER(?=\.github\.io/torchbagua)|(?<=@)OWNER\b")
UNRELEASED = "## [Unreleased]\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the release. Raises SystemExit if the working tree cannot be released, or a step fails."""
    parser = argparse.ArgumentParser(prog="release/release.py", description="make a release, without pushing it")
    parser.add_argument("version", help="the version to release, such as 0.1.0")
    parser.add_argument("--owner", help="the owner of the repository on GitHub, instead of the placeholder OWNER")
    options = parser.parse_args(arguments)
    obstacle = find_obstacle(options.version, options.owner)
    if obstacle:
        parser.error(obstacle)

    before = git("rev-parse", "HEAD").strip()
    try:
        done = list(prepare(options.version, options.owner))
        git("add", "--all")
        git("commit", "--quiet", "--message", f"Release {options.version}")
        git("tag", "--annotate", f"v{options.version}", "--message", f"torchbagua {options.version}")
        done.append(f"commit and tag v{options.version}")
    except (subprocess.CalledProcessError, ValueError, KeyboardInterrupt) as error:
        undo = f"git add --all && git reset --hard {before}"
        sys.exit(f"\nThe release failed: {error or 'interrupted'}\nNo tag was created. `{undo}` undoes all edits.")

    print(f"\nRelease {options.version}:")
    left = left_to_do(options.version, before)
    print("\n".join([*(f"  [x] {step}" for step in done), *(f"  [ ] {step}" for step in left)]))


def find_obstacle(version: str, owner: str | None = None) -> str | None:
    """Returns why `version` cannot be released from this working tree, or None."""
    if owner is not None and not re.fullmatch(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*", owner):
        return f"argument --owner: got {owner!r}, allowed: letters, digits and single hyphens"
    if git("branch", "--show-current").strip() != "main":
        return "the branch must be main: run `git switch main`"
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"argument version: got {version!r}, allowed: three numbers, such as 0.1.0"
    changed = git("status", "--porcelain")
    if changed:
        return f"the working tree must have no uncommitted change; commit or stash\n{changed}"
    tags = (re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", tag) for tag in git("tag", "--list").split())
    released = [tuple(map(int, tag.groups())) for tag in tags if tag]
    if tuple(map(int, version.split("."))) <= max(released, default=()):
        newest = ".".join(map(str, max(released)))
        return f"argument version: got {version!r}, allowed: a version after {newest}, the last release"
    return None


def prepare(version: str, owner: str | None) -> Iterator[str]:
    """Edits the files of the release and builds its wheels; yields a line for each step that it has done."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    edit(ROOT / "CHANGELOG.md", lambda text: cut_changelog(text, version, today.isoformat()))
    yield f"CHANGELOG.md: section {version}"
    if owner is not None:
        paths = placeholders()
        for path in paths:
            edit(path, lambda text: PLACEHOLDER.sub(owner, text))
        yield f"owner {owner} in {len(paths)} files"
    edit(ROOT / "torchbagua" / "version.py", lambda text: re.sub(r'(?<=__version__ = ").*(?=")', version, text))
    edit(ROOT / "CITATION.cff", lambda text: re.sub(r"(?m)(?<=^version: ).*", version, text))
    yield f"version {version} in torchbagua/version.py and CITATION.cff"

    run("tests/saved_states.py", version)
    run("-m", "pytest", "--quiet", "tests/test_saved_states.py")
    states = len(list((ROOT / "tests" / "data").glob(f"state-{version}-*.pt")))
    yield f"tests/data: {states} saved states of this release, which continue"
    run("release/wheels.py")
    yield "dist: " + ", ".join(sorted(path.name for path in (ROOT / "dist").iterdir()))
    run("benchmarks/first_step.py", "--rounds", "1")
    yield "the wheel's first training step, in an empty environment without a compiler"


def cut_changelog(text: str, version: str, date: str) -> str:
    """Returns the changelog with the unreleased changes as those of `version`. ValueError if there are none."""
    before, heading, after = text.partition(UNRELEASED)
    changes = after.partition("\n## [")[0].strip()
    if not heading or not changes:
        raise ValueError(f"CHANGELOG.md must list the changes of {version} after the line {UNRELEASED.strip()!r}")
    return f"{before}{heading}\n## [{version}] - {date}\n{after}"


def placeholders() -> list[Path]:
    """Returns the tracked files in which the owner is a placeholder."""
    tracked = (ROOT / name for name in git("ls-files").splitlines())
    texts = {".md", ".toml", ".yml", ".cff", ""}
    return [path for path in tracked if path.suffix in texts and PLACEHOLDER.search(path.read_text(encoding="utf-8"))]


def left_to_do(version: str, before: str) -> list[str]:
    """Returns the steps that need a network or a decision. `before` is the commit before the release."""
    unnamed = [str(path.relative_to(ROOT)) for path in placeholders()]
    return [
        *([name_owner(version, before, unnamed)] if unnamed else []),
        "write `pip install torchbagua` in README.md and docs/get-started.md, if this is the first release",
        "test this commit: `.ci/run`, and `make test-torch VERSION=...` with every supported torch",
        f"`git push origin HEAD v{version}`: the release workflow builds the wheels again and publishes them",
    ]


def name_owner(version: str, before: str, files: Sequence[str]) -> str:
    undo = f"git tag --delete v{version} && git reset --hard {before[:12]}"
    return f"replace the placeholder in {', '.join(files)}: `{undo}`, then `make release VERSION={version} OWNER=name`"


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
