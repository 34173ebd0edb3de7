"""Checks the built site: `python docs_build/check.py site` names what is wrong and ends with 1, or ends with 0.

Wrong is a link, picture or script that leads nowhere, or to a page without the anchor; whatever a page loads from
elsewhere; and a public name that has no docstring, or no place in the API reference. (zensical itself looks at links in
Markdown, and at references to names: not at docstrings, HTML and pictures.) The package is read, and not imported.
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
    "torchbagua.fsdp",
    "torchbagua.observe",
    "torchbagua.transport",
    "torchbagua.transport.suite",
)
# Public too: their objects are handed to users, or an algorithm of one's own is written with them.
FURTHER = (
    "torchbagua.algorithms.gradient.feedback.ErrorFeedback",
    "torchbagua.algorithms.weights.asynchronous.AsyncModelAverageAlgorithmImpl",
    "torchbagua.runtime.job.Job",
    "torchbagua.runtime.lane.Lane",
    "torchbagua.runtime.lockstep.Lockstep",
    "torchbagua.runtime.parameter_state.BucketState",
    "torchbagua.runtime.parameter_state.ParameterState",
    "torchbagua.runtime.parameter_state.residual_state",
    "torchbagua.observe.figures.Figures",
    "torchbagua.runtime.weight_bucket.WeightBucket",
    "torchbagua.runtime.weight_means.WeightMeans",
)
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """What a page has, leads to and loads."""

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
    """Yield what is wrong with links and with what is loaded, page by page."""
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: loads {one} from elsewhere" for one in page.loads if ELSEWHERE.match(one))
        if name.name == "404.html":  # is served for pages at any depth, with links from the root
            continue
        for link in dict.fromkeys(page.links + page.loads):
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target):
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            if not found.is_file():
                yield f"{name}: {link} leads nowhere"
            elif found in pages and unquote(anchor) not in pages[found].anchors:
                yield f"{name}: {link} leads to a page without this anchor"
    for path in site.rglob("*.css"):
        for one in LOADED_BY_STYLE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {one} from elsewhere"


def public_objects() -> dict[str, griffe.Object]:
    """Return every public class, function and value by its public path."""
    package = griffe.load("torchbagua", search_paths=[ROOT])
    paths = list(FURTHER)
    for path in MODULES:
        module = package.modules_collection[path]
        own = [name for name, one in module.members.items() if not one.is_alias and one.is_class]
        paths += [f"{path}.{name}" for name in module.exports or own if not str(name).startswith("_")]
    found: dict[str, griffe.Object] = {}
    for path in paths:
        one = package.modules_collection[path]
        one = one.final_target if one.is_alias else one
        if one.is_module:  # attach, say, the function of the module attach; else a module, whose names stand for it
            one = one.members.get(one.name)
        if one is not None:
            found[path] = one
    return found


def problems_of_names(anchors: set[str]) -> Iterator[str]:
    """Yield the public names, and the methods that public classes introduce, without a docstring or a place."""
    objects = public_objects()
    for path, one in objects.items():
        if path not in anchors:
            yield f"{path} is not in the API reference"
        if not one.is_attribute and not one.has_docstring:
            yield f"{path} has no docstring"
        inherited = {name for base in one.mro() for name in base.members} if one.is_class else set()
        for name, member in one.members.items():
            if name in inherited or name.startswith("_") or (member.is_attribute and "property" not in member.labels):
                continue
            if not any(other is one and f"{place}.{name}" in anchors for place, other in objects.items()):
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
