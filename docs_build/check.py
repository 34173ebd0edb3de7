"""Checks the built site: `python docs_build/check.py site` prints the problems and exits with 1, or exits with 0.

A problem is a link, picture or script with a missing target, a link to a page without the anchor, anything that a page
loads from another site, and a public name without a docstring or without a place in the API reference. (zensical itself
checks links in Markdown and references to names, but not docstrings, HTML and pictures.) The package is parsed, not
imported.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import griffe

ROOT = Path(__file__).parent.parent
MODULES = (
    "torchbagua",
    "torchbagua.compat.mlbench",
    "torchbagua.codecs",
    "torchbagua.collectives.topology",
    "torchbagua.elastic",
    "torchbagua.extend",
    "torchbagua.fsdp",
    "torchbagua.observe",
    "torchbagua.transport",
    "torchbagua.testing.transports",
)
# Also public: users receive their objects.
FURTHER = (
    "torchbagua.algorithms.weights.asynchronous.AsyncModelAverageAlgorithmImpl",
    "torchbagua.observe.figures.Figures",
)
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """The anchors of a page, its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif tag != "link":
            self.loads += [given["src"]] if "src" in given else []
        elif LOADED_RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        self.loads += LOADED_BY_STYLE.findall(given.get("style", ""))


def problems_of_pages(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield the problems of links and loaded files, page by page."""
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: loads {url} from another site" for url in page.loads if ELSEWHERE.match(url))
        if name.name == "404.html":  # it is served for pages at any depth, with links from the root
            continue
        for link in dict.fromkeys(page.links + page.loads):
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target):
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            if not found.is_file():
                yield f"{name}: the target of {link} does not exist"
            elif found in pages and unquote(anchor) not in pages[found].anchors:
                yield f"{name}: the target page of {link} does not have this anchor"
    for path in site.rglob("*.css"):
        for url in LOADED_BY_STYLE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {url} from another site"


def public_objects() -> dict[str, griffe.Object]:
    """Return every public class, function and value by its public path."""
    package = griffe.load("torchbagua", search_paths=[ROOT])
    paths = list(FURTHER)
    for path in MODULES:
        module = package.modules_collection[path]
        own = [name for name, member in module.members.items() if not member.is_alias and member.is_class]
        paths += [f"{path}.{name}" for name in module.exports or own if not str(name).startswith("_")]
    found: dict[str, griffe.Object] = {}
    for path in paths:
        member = package.modules_collection[path]
        member = member.final_target if member.is_alias else member
        if member.is_module:  # such as attach: the function in the module attach; other modules are listed by name
            member = member.members.get(member.name)
        if member is not None:
            found[path] = member
    return found


def problems_of_names(anchors: set[str]) -> Iterator[str]:
    """Yield the public names, and methods that public classes introduce, without a docstring or a reference entry."""
    objects = public_objects()
    for path, public in objects.items():
        # A class may have several names, of which one is enough: a short one, and one in the module of authors.
        others = [place for place, other in objects.items() if other is public] + [f"{path}Algorithm"]
        if path not in anchors and not anchors.intersection(others):
            yield f"{path} is not in the API reference"
        if not public.is_attribute and not public.has_docstring:
            yield f"{path} has no docstring"
        inherited = {name for base in public.mro() for name in base.members} if public.is_class else set()
        for name, member in public.members.items():
            if name in inherited or name.startswith("_") or (member.is_attribute and "property" not in member.labels):
                continue
            if not any(other is public and f"{place}.{name}" in anchors for place, other in objects.items()):
                yield f"{path}.{name} is not in the API reference"
            if not member.has_docstring:
                yield f"{path}.{name} has no docstring"


def main(site: Path) -> int:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    anchors = {anchor for path, page in pages.items() if path.parent.name == "api" for anchor in page.anchors}
    problems = [*problems_of_pages(site, pages), *problems_of_names(anchors)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{site.name}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
