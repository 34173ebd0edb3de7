"""The built documentation, opened as files in headless Chromium without network access.

`make test-browser` runs it. If TORCHBAGUA_PICTURES is set to a folder, it writes screenshots there.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageStat

import programs

pytestmark = pytest.mark.browser

SITE = Path(__file__).parent.parent / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
SHOWN = ("index.html", "algorithms/bytegrad.html", "design.html", "api/attach.html")
NETWORK_OFF = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking")


def chromium(*arguments: str, folder: Path, dark: bool = False) -> tuple[str, list[str]]:
    """Run headless Chromium; return its output, and the messages of the page's console."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert binary, "there is no Chromium; `make test-browser` says how to get it"
    command = [
        *(binary, "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000", *NETWORK_OFF),
        *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *arguments,
    ]
    done = programs.run(command, timeout_s=120)
    return done.stdout, re.findall(r"CONSOLE.*?\] (.*)", done.stderr)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_renders_its_equations_and_diagrams_without_console_messages(page: str, tmp_path: Path) -> None:
    source = (SITE / page).read_text(encoding="utf-8")
    document, console = chromium("--dump-dom", (SITE / page).as_uri(), folder=tmp_path)
    assert console == []
    num_equations = source.count('class="arithmatex"')
    assert document.count('class="katex"') == num_equations
    assert "katex-error" not in document
    # The theme replaces each diagram's text with a shadow tree, which a dump does not show.
    assert document.count('<div class="mermaid">') == source.count('<pre class="mermaid">')
    assert '<pre class="mermaid">' not in document


def screenshot(page: str, width: int, height: int, picture: Path, *, dark: bool) -> None:
    """Take a picture of the top of a page, in a frame: a Chromium window has a minimum width."""
    frame = picture.with_suffix(".html")
    address = (SITE / page).as_uri()
    frame.write_text(
        "<style>body { margin: 0 } iframe { border: 0; display: block }</style>"
        f'<iframe src="{address}" width="{width}" height="{height}"></iframe>'
    )
    chromium(
        f"--screenshot={picture}",
        f"--window-size={max(width, 500)},{height}",
        "--allow-file-access-from-files",
        frame.as_uri(),
        folder=picture.parent,
        dark=dark,
    )
    with Image.open(picture) as image:
        image.crop((0, 0, width, height)).save(picture)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_follows_the_color_scheme_of_the_system(page: str, width: int, dark: bool, tmp_path: Path) -> None:
    picture = tmp_path / f"{page.replace('/', '-').removesuffix('.html')}-{width}-{'dark' if dark else 'light'}.png"
    screenshot(page, width, 1000, picture, dark=dark)
    with Image.open(picture) as image:
        is_dark = ImageStat.Stat(image.convert("L")).mean[0] < 128
    assert is_dark == dark
    if pictures := os.environ.get("TORCHBAGUA_PICTURES"):
        shutil.copy(picture, pictures)


def test_the_site_is_built() -> None:
    assert len(PAGES) > 30, "`make docs` builds it"
