"""Puts the scripts that pages need into docs/assets/vendor, so that the site loads nothing from elsewhere.

KaTeX sets equations, Mermaid draws diagrams, and with iframe-worker the search works where pages are opened as files.

npm packs each by its version, and what comes must have the checksum that stands here. Does nothing where they are.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "docs" / "assets" / "vendor"
# By npm's name and version: the checksum of the archive, as a lock file of npm's writes it, and what is taken of it.
PACKAGES = {
    "iframe-worker@1.0.4": ("sha512-roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==", ["shim/index.js", "LICENSE"]),
    "katex@0.19.1": ("sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==", ["dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2", "LICENSE"]),
    "mermaid@12.3.0": ("sha512-4113TdXeLAsMruJ79OpFL5O8+LTFXhQqZ260rF3tgUmiNAtRm4Uume04I+65PRN6yZ69J4f8rVYWW8zRk65UYw==", ["dist/mermaid.min.js", "LICENSE"]),
}


def main() -> None:
    if shutil.which("npm") is None and not all(is_there(name) for name in PACKAGES):
        sys.exit("make docs: npm is needed, which fetches KaTeX and Mermaid (Debian: the package npm)")
    for name, (checksum, patterns) in PACKAGES.items():
        if not is_there(name):
            fetch(name, checksum, patterns)


def folder_of(name: str) -> Path:
    return VENDOR / name.partition("@")[0]


def is_there(name: str) -> bool:
    version = folder_of(name) / "version"
    return version.is_file() and version.read_text() == name


def fetch(name: str, checksum: str, patterns: list[str]) -> None:
    """Download one package and take of it what `patterns` name, without the folder that they are in."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            ["npm", "pack", "--silent", "--ignore-scripts", name], cwd=temporary, check=True, stdout=subprocess.DEVNULL
        )
        (archive,) = Path(temporary).glob("*.tgz")
        found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
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
