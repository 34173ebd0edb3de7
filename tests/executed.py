"""A plugin of pytest that records which functions of the package each test file executes; run_mutants.py reads them.

Each process of pytest-xdist writes a JSON file to the folder in EXECUTED: for each test file, its functions as
"file:line", with the line of the first decorator or of the `def`.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).parent.parent

_codes: set[CodeType] = set()
_executed: dict[str, set[str]] = defaultdict(set)


def _record(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        _codes.add(frame.f_code)


def pytest_sessionstart() -> None:
    threading.setprofile(_record)
    sys.setprofile(_record)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    result = yield
    package = str(ROOT / "torchbagua")
    for code in _codes.copy():
        if code.co_filename.startswith(package):
            place = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            _executed[str(item.path.relative_to(ROOT))].add(place)
    _codes.clear()
    return result


def pytest_sessionfinish() -> None:
    sys.setprofile(None)
    threading.setprofile(None)
    texts = {file: sorted(places) for file, places in _executed.items()}
    Path(os.environ["EXECUTED"], f"{os.getpid()}.json").write_text(json.dumps(texts))
