"""The traces of `torchbagua demo` in TensorBoard, and the built documentation, in headless Chromium.

`make test-browser` runs these tests. If TORCHBAGUA_PICTURES names a folder, they save their screenshots there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageStat

import programs

pytestmark = pytest.mark.browser

STEPS = int(os.environ.get("TORCHBAGUA_DEMO_STEPS", "60"))
LIMIT_S = 300
PAGE_LIMIT_S = 60
WINDOW = "--window-size=1900,1330"
CHARTS = ("a_step", "compression_ratio_to_float32", "exposed_ms", "overlap_percent", "sent_MB_a_step", "step_ms")
# TensorBoard's color of its only run; the timeline's colors of backward and of messages, which are short on loopback.
LINES, BACKWARD, MESSAGES = (0x42, 0x50, 0x66), (0xBB, 0xBB, 0xBB), (0xEF, 0xC4, 0x66)
LEAST_PIXELS = {LINES: 2000, BACKWARD: 1000, MESSAGES: 20}


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve `folder` on a free port of loopback, and give the address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    with programs.started(command, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:  # ends when the server exits
            lines.append(line)
            if address := re.search(r"http://127\.0\.0\.1:\d+/", line):
                break
        assert address, lines
        yield address[0]


def chromium(*arguments: str, folder: Path) -> tuple[str, list[str]]:
    """Run headless Chromium until the page has long been idle; return its output, and what the page's console shows."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert binary, "there is no Chromium; `make test-browser` says how to get it"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=30000"]
    options += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    done = programs.run([binary, *options, *arguments], timeout_s=LIMIT_S)
    return done.stdout, re.findall(r"CONSOLE.*?\] (.*)", done.stderr)


def keep(picture: Path) -> None:
    if pictures := os.environ.get("TORCHBAGUA_PICTURES"):
        shutil.copy(picture, pictures)


def num_pixels(picture: Path, colour: tuple[int, int, int]) -> int:
    """Return the number of pixels of about this color."""
    with Image.open(picture) as image:
        counts = image.convert("RGB").getcolors(maxcolors=1 << 24)
    return sum(
        count
        for count, pixel in counts
        if all(abs(value - wanted) < 12 for value, wanted in zip(pixel, colour, strict=True))
    )


def wait_until_nothing(find: Callable[[], object]) -> None:
    """Retry until nothing is missing: on a busy machine Chromium can finish a page before its charts are drawn."""
    deadline_s = time.monotonic() + PAGE_LIMIT_S
    while missing := find():
        assert time.monotonic() < deadline_s, missing


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the demo; return the folder that it tells users of TensorBoard to open."""
    output = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "torchbagua.cli", "demo", "--steps", str(STEPS), "--rate", "0"]
    done = programs.run([*command, "--output", str(output)], timeout_s=LIMIT_S)
    advice = re.search(r"tensorboard --logdir (\S+)", done.stdout)
    assert advice
    return Path(advice[1])


def test_the_first_screen_shows_the_charts(demo: Path, tmp_path: Path) -> None:
    screenshot, empty = tmp_path / "tensorboard.png", tmp_path / "empty.png"
    (tmp_path / "nothing").mkdir()
    with tensorboard(tmp_path / "nothing") as address:
        chromium(WINDOW, f"--screenshot={empty}", f"{address}#timeseries", folder=tmp_path)
    pixels_without_runs = {colour: num_pixels(empty, colour) for colour in LEAST_PIXELS}

    def missing_charts() -> list[str]:
        page = re.sub("<[^>]*>", "", chromium(WINDOW, "--dump-dom", f"{address}#timeseries", folder=tmp_path)[0])
        return [chart for chart in CHARTS if f"communication/{chart}" not in page]

    def missing_colours() -> dict[tuple[int, int, int], int]:
        chromium(WINDOW, f"--screenshot={screenshot}", f"{address}?smoothing=0#timeseries", folder=tmp_path)
        found = {colour: num_pixels(screenshot, colour) - pixels_without_runs[colour] for colour in LEAST_PIXELS}
        return {colour: number for colour, number in found.items() if number < LEAST_PIXELS[colour]}

    with tensorboard(demo) as address:
        wait_until_nothing(missing_charts)
        wait_until_nothing(missing_colours)
    keep(screenshot)


def test_custom_scalars_have_several_lines_in_a_chart(demo: Path) -> None:
    """Read the layout from TensorBoard's server, because a dump of the page does not contain it."""
    with tensorboard(demo) as address, urllib.request.urlopen(f"{address}data/plugin/custom_scalars/layout") as answer:
        layout = json.load(answer)
    titles = {category["title"]: [chart["title"] for chart in category["chart"]] for category in layout["category"]}
    assert titles["communication"] == ["a step (ms)", "phases of a step (ms)"]
    assert titles["communication of all ranks"] == ["step_ms", "exposed_ms", "sent_MB_a_step", "communication_ms"]


SITE = Path(__file__).parent.parent / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
SHOWN = ("index.html", "algorithms/bytegrad.html", "design.html", "api/attach.html")
NETWORK_OFF = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking")


def test_the_site_is_built() -> None:
    assert len(PAGES) > 30, "`make docs` builds it"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_renders_its_equations_and_diagrams_without_console_messages(page: str, tmp_path: Path) -> None:
    source = (SITE / page).read_text(encoding="utf-8")
    document, console = chromium(*NETWORK_OFF, "--dump-dom", (SITE / page).as_uri(), folder=tmp_path)
    assert console == []
    assert document.count('class="katex"') == source.count('class="arithmatex"')
    assert "katex-error" not in document
    # The theme replaces each diagram's text with a shadow tree, which a dump does not show.
    assert document.count('<div class="mermaid">') == source.count('<pre class="mermaid">')
    assert '<pre class="mermaid">' not in document


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_follows_the_color_scheme_of_the_system(page: str, width: int, is_dark: bool, tmp_path: Path) -> None:
    """The picture shows the top of a page, in a frame: a Chromium window has a minimum width."""
    picture = tmp_path / f"{page.replace('/', '-').removesuffix('.html')}-{width}-{'dark' if is_dark else 'light'}.png"
    frame = picture.with_suffix(".html")
    frame.write_text(
        "<style>body { margin: 0 } iframe { border: 0; display: block }</style>"
        f'<iframe src="{(SITE / page).as_uri()}" width="{width}" height="1000"></iframe>'
    )
    options = (f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--allow-file-access-from-files")
    window = (f"--window-size={max(width, 500)},1000", f"--screenshot={picture}")
    chromium(*NETWORK_OFF, *options, *window, frame.as_uri(), folder=tmp_path)
    with Image.open(picture) as image:
        image.crop((0, 0, width, 1000)).save(picture)
    with Image.open(picture) as image:
        assert (ImageStat.Stat(image.convert("L")).mean[0] < 128) == is_dark
    keep(picture)
