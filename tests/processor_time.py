"""The processor time that the tests take, printed at the end with the files that take most of it.

Unlike the duration of a run, it hardly depends on what else the machine does.
"""

import operator
import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

import warm_python

_NUM_FILES = 10
_OTHER = "imports and collection"


class ProcessorTime:
    """Sums the processor time of this process, and of the processes that its tests start, for each test file."""

    def __init__(self) -> None:
        self._user_s: Counter[str] = Counter()
        self._system_s: Counter[str] = Counter()
        self._last = [0.0] * 4
        self._add(_OTHER)

    def _add(self, name: str) -> None:
        times, (forks_user_s, forks_system_s) = os.times(), warm_python.processor_times()
        now = [
            times.user,
            times.system,
            times.children_user + forks_user_s,
            times.children_system + forks_system_s,
        ]
        user_s, system_s, started_user_s, started_system_s = map(operator.sub, now, self._last)
        self._last = now
        if name != _OTHER:  # outside of tests this process starts only workers, which report themselves
            user_s += started_user_s
            system_s += started_system_s
        self._user_s[name] += user_s
        self._system_s[name] += system_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._add(_OTHER)
        try:
            return (yield)
        finally:
            self._add(item.nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._add(_OTHER)
        worker = getattr(session.config, "workeroutput", None)
        if worker is not None:
            worker["processor time"] = dict(self._user_s), dict(self._system_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist reports, in the process that prints the summary."""
        user_s, system_s = getattr(node, "workeroutput", {}).get("processor time", ({}, {}))
        self._user_s.update(user_s)
        self._system_s.update(system_s)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        user_s, system_s = self._user_s.total(), self._system_s.total()
        terminalreporter.section(f"processor time: {user_s:.0f} s user, {system_s:.0f} s system")
        total_s = self._user_s + self._system_s
        for name, time_s in total_s.most_common(_NUM_FILES):
            terminalreporter.line(f"{time_s:7.1f} s  {name}")
