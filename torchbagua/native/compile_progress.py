"""Reports on stderr that a library is being compiled, which takes seconds to minutes."""

import sys
import time
from pathlib import Path


class CompileProgress:
    """One line on stderr. On a terminal, `show` updates it with the number of compiled files and the time."""

    def __init__(self, subject: str, folder: Path, num_sources: int) -> None:
        self._text = f"torchbagua: compiling {subject}, once per machine"
        self._folder = folder
        self._num_sources = num_sources
        self._start_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        if not self._is_terminal:
            self._write(f"{self._text}\n")

    def show(self) -> None:
        """Update the line."""
        if self._is_terminal:
            num_compiled = len(list(self._folder.glob("*.o")))
            passed_s = time.monotonic() - self._start_s
            self._write(f"\r{self._text}: {num_compiled} of {self._num_sources} files, {passed_s:.0f} s")

    def end(self) -> None:
        """End the line."""
        if self._is_terminal:
            self.show()
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
