"""`make release`: the edits of the working tree, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "release"))
import release

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- New.\n\n## [0.9.0] - 2026-01-01\n\n- Old.\n"


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls git in a repository with one commit, which `release` then works on."""

    def run(*arguments: str) -> None:
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    run("init", "--initial-branch=main")
    (tmp_path / "page.md").write_text("https://github.com/OWNER/torchbagua, https://OWNER.github.io/torchbagua, _OWNER")
    (tmp_path / "code.py").write_text('_OWNER = "https://github.com/OWNER/torchbagua"')
    run("add", "--all")
    run("commit", "--message=start")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return run


def test_changelog_gets_a_section_of_the_release() -> None:
    assert release.cut_changelog(CHANGELOG, "1.0.0", "2026-02-03") == (
        "# Changelog\n\n## [Unreleased]\n\n## [1.0.0] - 2026-02-03\n\n### Added\n\n- New.\n\n"
        "## [0.9.0] - 2026-01-01\n\n- Old.\n"
    )
    nothing_new = CHANGELOG.replace("### Added\n\n- New.\n\n", "")
    with pytest.raises(ValueError, match=r"the changes of 1.0.0 after the line '## \[Unreleased\]'"):
        release.cut_changelog(nothing_new, "1.0.0", "2026-02-03")


def test_obstacles_are_named(git: Callable[..., None], tmp_path: Path) -> None:
    assert release.find_obstacle("0.1.0") is None
    for tag in ("v0.9.0", "v0.10.0", "v1.0.0rc1"):
        git("tag", tag)
    assert release.find_obstacle("0.10.1") is None
    for version in ("0.9.1", "0.10.0"):
        assert f"got '{version}', allowed: a version after 0.10.0" in str(release.find_obstacle(version))
    for version in ("1.0", "v1.0.0", "1.0.0rc1", ""):
        assert f"got {version!r}, allowed: three numbers" in str(release.find_obstacle(version))
    for owner in ("", "some/body", "a b", "-a", "a--b"):
        assert f"argument --owner: got {owner!r}" in str(release.find_obstacle("0.10.1", owner))
    (tmp_path / "new.py").touch()
    assert "no uncommitted change; commit or stash\n?? new.py" in str(release.find_obstacle("0.10.1"))
    (tmp_path / "new.py").unlink()
    git("switch", "--create", "side")
    assert "the branch must be main" in str(release.find_obstacle("0.10.1"))


@pytest.mark.usefixtures("git")
def test_owner_is_named_in_texts(tmp_path: Path) -> None:
    assert release.placeholders() == [tmp_path / "page.md"]
    assert "replace the placeholder in page.md" in release.left_to_do("0.1.0", "abc")[0]
    release.edit(tmp_path / "page.md", lambda text: release.PLACEHOLDER.sub("me", text))
    assert (tmp_path / "page.md").read_text() == (
        "https://github.com/me/torchbagua, https://me.github.io/torchbagua, _OWNER"
    )
    assert release.placeholders() == []
    assert "placeholder" not in "".join(release.left_to_do("0.1.0", "abc"))
