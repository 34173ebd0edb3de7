"""Runs `torchbagua <command> ...`, also as `python -m torchbagua.cli`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import torchbagua

_COMMANDS = {
    "demo": "train a small GPT on several processes, plain DDP beside ByteGrad, and compare them",
    "trace": "show, draw or merge what PerfettoTrace has written in a training run",
    "doctor": "say what torchbagua finds on this machine and which kernels it runs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named by the first of `arguments` (default: the process's own) and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchbagua",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"  {name:8} {what}" for name, what in _COMMANDS.items()),
        epilog="`torchbagua <command> --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"torchbagua {torchbagua.__version__}")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the command")
    parsed = parser.parse_args(arguments)
    # Only the command that runs is imported: the demo needs packages that the others do without.
    status: int = importlib.import_module(f"torchbagua.cli.{parsed.command}").main(parsed.options)
    return status


if __name__ == "__main__":
    sys.exit(main())
