"""Checks the built site: `python docs_build/check.py site` names what is wrong and ends with 1, or ends with 0.

Wrong is a link or an anchor within the site that leads nowhere, a reference to a name that the API reference does not
have, whatever a page loads from elsewhere, and a public name without a docstring or without a place in the reference.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import FunctionType
from urllib.parse import unquote, urldefrag

MODULES = ("torchbagua", "torchbagua.compressors", "torchbagua.topology", "torchbagua.traces")
# Public too: their objects are handed to users, or an algorithm of one's own is written with them.
FURTHER = (
    "torchbagua.algorithms.AsyncModelAverageAlgorithmImpl",
    "torchbagua.events.Run",
    "torchbagua.lane.Job",
    "torchbagua.lane.Lane",
    "torchbagua.state.BucketState",
    "torchbagua.state.ParameterState",
    "torchbagua.state.residual_state",
    "torchbagua.traces.figures.Figures",
    "torchbagua.weights.WeightBucket",
)
# Which attribute of an element is loaded with the page, or is followed by its reader.
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "font", "manifest"}
ELSEWHERE = re.compile(r"(?:https?:)?//")
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """What a page has, leads to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.loads: list[str] = LOADED_BY_STYLE.findall(
            re.sub(r"<script.*?</script>|<code.*?</code>", "", text, flags=re.S)
        )
        self.unresolved: list[str] = re.findall(r"\]\[(torchbagua[\w.]*)\]", text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and LOADED_RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        elif tag == "autoref":
            self.unresolved.append(given.get("identifier", "?"))


def problems_of_pages(site: Path) -> Iterator[str]:
    """Yield what is wrong with links and with what is loaded, page by page."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        yield from (f"{name}: the reference to {one} is not resolved" for one in page.unresolved)
        yield from (f"{name}: loads {one} from elsewhere" for one in page.loads if ELSEWHERE.match(one))
        if name.name == "404.html":  # is served for pages at any depth, with links from the root
            continue
        own = [one for one in page.loads if not ELSEWHERE.match(one)]
        for link in dict.fromkeys([*page.links, *own]):
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target):
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            if found.is_dir():
                found /= "index.html"
            if not found.is_file():
                yield f"{name}: {link} leads nowhere"
            elif found in pages and unquote(anchor) not in pages[found].anchors:
                yield f"{name}: {link} leads to a page without this anchor"
    for path in site.rglob("*.css"):
        for one in LOADED_BY_STYLE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {one} from elsewhere"


def public_names() -> Iterator[tuple[str, object]]:
    """Yield every public name with its object, modules aside: their own names stand for them."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        named = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module_name
        ]
        for name in named:
            if not name.startswith("_") and not inspect.ismodule(value := getattr(module, name)):
                yield f"{module_name}.{name}", value
    for path in FURTHER:
        module_name, _, name = path.rpartition(".")
        yield path, getattr(importlib.import_module(module_name), name)


def problems_of_names(anchors: set[str]) -> Iterator[str]:
    """Yield the public names, and public methods of classes, that lack a docstring or are not in the reference."""
    names = dict(public_names())
    paths_of: dict[int, list[str]] = {}
    for path, value in names.items():
        paths_of.setdefault(id(value), []).append(path)
    for path, value in names.items():
        if path not in anchors:
            yield f"{path} is not in the API reference"
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
            yield f"{path} has no docstring"
        for method in methods_of(value) if inspect.isclass(value) else ():
            # Where a base class's method is overridden, or inherited, its place is that of the base class's.
            bases = [base for one in value.__mro__ for base in paths_of.get(id(one), ())]
            if not any(f"{base}.{method}" in anchors for base in bases):
                yield f"{path}.{method} is not in the API reference"
            if not inspect.getdoc(getattr(value, method)):
                yield f"{path}.{method} has no docstring"


def methods_of(cls: type) -> Iterator[str]:
    """Yield the public methods and properties of `cls` that the package itself defines."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "torchbagua":
            for name, value in vars(base).items():
                is_method = isinstance(value, FunctionType | property | classmethod | staticmethod)
                if is_method and not name.startswith("_"):
                    yield name


def main(site: Path) -> int:
    problems = list(problems_of_pages(site))
    anchors = {anchor for path in site.glob("api/*.html") for anchor in Page(path.read_text(encoding="utf-8")).anchors}
    problems += sorted(set(problems_of_names(anchors)))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{site}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
