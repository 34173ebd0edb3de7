"""Runs `torchbagua <command> ...`, also as `python -m torchbagua.cli`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import torchbagua

_COMMANDS = {
    "demo": "train a small GPT on several processes with plain DDP and with ByteGrad, and compare both",
    "trace": "show, draw or merge the files that PerfettoTrace wrote in a training run",
    "doctor": "report what torchbagua finds on this machine and which kernels it runs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named by the first argument (default: sys.argv) and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchbagua",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"  {name:8} {purpose}" for name, purpose in _COMMANDS.items()),
        epilog="`torchbagua <command> --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"torchbagua {torchbagua.__version__}")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the command")
    parsed = parser.parse_args(arguments)
    # Only the requested command is imported: the demo needs packages that the other commands do not need.
    status: int = importlib.import_module(f"torchbagua.cli.{parsed.command}").main(parsed.options)
    return status


if __name__ == "__main__":
    sys.exit(main())
