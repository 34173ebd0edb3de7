"""`torchbagua demo`: train a small GPT on several processes with plain DDP, then with ByteGrad, and compare both."""

import argparse
import importlib.util
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_EXTRA = ("matplotlib", "tensorboard", "tqdm")  # of pyproject.toml


def main(arguments: Sequence[str] = ()) -> int:
    """Trains, prints the table, and writes `results.json`, `loss.png` and traces of the ByteGrad run.

    Returns:
        0 if the losses agree, 1 if they do not or a rank failed, 128 + the signal if a signal ended the demo.

    Raises:
        SystemExit: an option is invalid, or a package of `torchbagua[demo]` is missing; the message names it.
    """
    parser = argparse.ArgumentParser(prog="torchbagua demo", description=__doc__)
    parser.add_argument("--nproc", type=_integer(2, 64), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--steps", type=_integer(1, 10**6), default=500, metavar="N", help="steps of each run (default: 500)"
    )
    parser.add_argument(
        "--seed", type=_integer(0, 2**32), default=0, metavar="N", help="seed of the weights and batches (default: 0)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="output folder (default: runs/demo)"
    )
    options = parser.parse_args(arguments)
    for name in _EXTRA:
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name} is not installed: pip install 'torchbagua[demo]'")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: got {str(options.output)!r}, allowed: a folder to write to; {error}")

    try:
        return _compare_runs(parser, options)
    except ChildFailedError as error:
        print(f"\ntorchbagua demo: a rank failed\n{error}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"\ntorchbagua demo: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except KeyboardInterrupt:
        print("\ntorchbagua demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _compare_runs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    # Not at the top: these modules need the extra, but `--help` does not.
    from torchbagua.cli.demo.launch import launch
    from torchbagua.cli.demo.report import Comparison, describe, write
    from torchbagua.cli.demo.text import read_standard_library
    from torchbagua.cli.demo.train import Settings
    from torchbagua.observe.files import find_files
    from torchbagua.observe.perfetto import merge

    try:
        text_mb = len(read_standard_library()) / 1e6
    except FileNotFoundError as error:
        parser.error(str(error))
    # One folder per run, so that TensorBoard shows the runs side by side.
    traces = options.output / "traces" / time.strftime("%Y%m%d-%H%M%S")
    settings = Settings(nproc=options.nproc, steps=options.steps, seed=options.seed, traces=str(traces))
    print(f"{settings.nproc} ranks over gloo train a small GPT on {text_mb:.1f} MB of Python sources", flush=True)
    comparison = Comparison(*launch(settings))
    print(f"\n{describe(comparison)}\n")
    for path in (*write(comparison, settings, options.output), traces):
        print(f"wrote {path}")
    try:
        merged = merge(find_files(traces).files, traces / "merged.json.gz").path
    except (ValueError, OSError) as error:
        print(f"torchbagua demo: the trace is incomplete: {error}", file=sys.stderr)
        return 1
    print(
        "\nTo see the cost of ByteGrad's communication over time:"
        f"\n  torchbagua trace show {shlex.quote(str(traces))}"
        f"\n  tensorboard --logdir {shlex.quote(str(traces.parent))}"
        f"\n  open {merged} in https://ui.perfetto.dev"
    )
    return 0 if comparison.losses_agree else 1


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a type for argparse, which puts the option's name before the message."""

    def parse(value: str) -> int:
        if not value.isascii() or not value.isdigit() or not lowest <= int(value) <= highest:
            raise argparse.ArgumentTypeError(f"got {value!r}, allowed: an integer from {lowest} to {highest}")
        return int(value)

    return parse
