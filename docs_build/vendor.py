"""Puts the scripts that pages need into docs/assets/vendor, so that the site loads nothing from other sites.

KaTeX typesets equations, Mermaid draws diagrams, and iframe-worker makes the search work if pages are opened as files.

npm downloads each package by its version, and the archive must have the checksum listed here. Packages that are already
in the folder are skipped.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "docs" / "assets" / "vendor"
# By npm name and version: the SHA-512 of the archive, in hexadecimal, and the files to copy from it.
PACKAGES = {
    "iframe-worker@1.0.4": (
        "ae879a688f8b8352c935f8290a3a117bff96cc48f2f7e674f0ba04beef393023"
        "db063c26faa5f3f00839534e651dae95d42cac6721b313448e900b52500e6aed",
        ["shim/index.js", "LICENSE"],
    ),
    "katex@0.19.1": (
        "8c6f2e2a7b63484726d84a503a1d17b6eae93eeb82f6bdd2ab91cb1ddb057566"
        "53dbb13aef6485d7d4048bea1fd3f61e3b2d7994381184abebe7ad78b91ac47c",
        ["dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2", "LICENSE"],
    ),
    "mermaid@12.3.0": (
        "e35d774dd5de2c0b0caee27bf4ea452f93bcf8b4c55e142a676eb4ac5ded8149"
        "a2340b519b852e99ed3823eeb93d137ac99ebd2787fcad56165bccd193ae5463",
        ["dist/mermaid.min.js", "LICENSE"],
    ),
}


def main() -> None:
    if shutil.which("npm") is None and not all(is_there(name) for name in PACKAGES):
        sys.exit("make docs: npm is not installed; install it to download KaTeX and Mermaid (Debian: the package npm)")
    for name, (checksum, patterns) in PACKAGES.items():
        if not is_there(name):
            fetch(name, checksum, patterns)


def folder_of(name: str) -> Path:
    return VENDOR / name.partition("@")[0]


def is_there(name: str) -> bool:
    version = folder_of(name) / "version"
    return version.is_file() and version.read_text() == name


def fetch(name: str, checksum: str, patterns: list[str]) -> None:
    """Download one package and copy the files that match `patterns`, without the folder that contains them."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            ["npm", "pack", "--silent", "--ignore-scripts", name], cwd=temporary, check=True, stdout=subprocess.DEVNULL
        )
        (archive,) = Path(temporary).glob("*.tgz")
        found = hashlib.sha512(archive.read_bytes()).hexdigest()
        if found != checksum:
            sys.exit(f"make docs: {name} must have the checksum {checksum}, got {found}")
        with tarfile.open(archive) as members:
            members.extractall(temporary, filter="data")
        target = folder_of(name)
        shutil.rmtree(target, ignore_errors=True)
        for pattern in patterns:
            for source in sorted((Path(temporary) / "package").glob(pattern)):
                place = target / source.relative_to(Path(temporary) / "package").as_posix().removeprefix("dist/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
        (target / "version").write_text(name)


if __name__ == "__main__":
    main()
