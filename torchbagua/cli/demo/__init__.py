"""`torchbagua demo`: train a small GPT on several processes with plain DDP, then with ByteGrad, and compare both."""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from torchbagua import native
from torchbagua.cli.namespaces import NetworkError, why_unavailable
from torchbagua.observe.perfetto import find_files, merge

_EXTRA = ("matplotlib", "tensorboard")  # of pyproject.toml
_DEFAULT_RATE_MBIT = 200


def main(arguments: Sequence[str] = ()) -> int:
    """Trains, prints the table, and writes `results.json`, traces of the ByteGrad run, and `loss.png`.

    Without the packages of `torchbagua[demo]` it writes neither the picture nor traces for TensorBoard.

    Returns:
        0 if the losses agree, 1 if they do not or a rank failed, 128 + the signal if a signal ended the demo.

    Raises:
        SystemExit: an option is invalid; the message names it.
    """
    parser = argparse.ArgumentParser(prog="torchbagua demo", description=__doc__)
    parser.add_argument("--nproc", type=_integer(2, 64), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--steps", type=_integer(1, 10**6), default=100, metavar="N", help="steps of each run (default: 100)"
    )
    parser.add_argument(
        "--seed", type=_integer(0, 2**32), default=0, metavar="N", help="seed of the weights and batches (default: 0)"
    )
    parser.add_argument(
        "--rate",
        type=_integer(0, 100_000),
        metavar="N",
        help="Mbit/s of an emulated network, which needs root; 0: loopback "
        f"(default: {_DEFAULT_RATE_MBIT} if this machine can emulate a network, else 0)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="output folder (default: runs/demo)"
    )
    options = parser.parse_args(arguments)
    try:
        (options.output / "traces").mkdir(parents=True, exist_ok=True)
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
    # Not at the top: when ranks run train.py, this package must not have imported it already.
    from torchbagua.cli.demo.launch import handled_signals, launch
    from torchbagua.cli.demo.report import Comparison, describe, write
    from torchbagua.cli.demo.text import read_standard_library
    from torchbagua.cli.demo.train import Settings

    for number in handled_signals():
        signal.signal(number, _raise_signal)  # until the launcher installs its own, which raises the same

    try:
        text_mb = len(read_standard_library()) / 1e6
    except FileNotFoundError as error:
        parser.error(str(error))
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    # One folder per run, so that TensorBoard shows the runs side by side.
    traces = options.output / "traces" / time.strftime("%Y%m%d-%H%M%S")
    if traces.exists():
        traces = traces.with_name(f"{traces.name}-{os.getpid()}")
    traces.mkdir()
    rate_mbit, network = _choose_network(parser, options.rate)
    settings = Settings(
        nproc=options.nproc,
        steps=options.steps,
        seed=options.seed,
        rate_mbit=rate_mbit,
        traces=str(traces),
        with_tensorboard="tensorboard" not in missing,
    )
    print(f"{settings.nproc} ranks over gloo train a small GPT on {text_mb:.1f} MB of Python sources: first with")
    print("plain DDP, then with ByteGrad, which sends gradients in 8 bits.")
    print(f"Network: {network}.", flush=True)
    try:
        native.load()  # before the ranks do, since it may compile
    except (RuntimeError, ValueError) as error:
        print(f"torchbagua demo: {error}", file=sys.stderr)
        return 1
    try:
        comparison = Comparison(*launch(settings))
    except NetworkError as error:
        print(f"torchbagua demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{describe(comparison, settings)}\n")
    print(f"wrote {write(comparison, settings, options.output)}")
    if "matplotlib" not in missing:
        from torchbagua.cli.demo.picture import draw

        draw(comparison, settings).savefig(options.output / "loss.png")
        print(f"wrote {options.output / 'loss.png'}")
    try:
        merged = merge(find_files(traces).files, traces / "merged.json.gz").path
    except (ValueError, OSError) as error:
        print(f"torchbagua demo: the trace is incomplete: {error}", file=sys.stderr)
        return 1
    print(f"wrote {traces}")
    print(
        "\nTo see the cost of ByteGrad's communication over time:"
        f"\n  {_program('torchbagua')} trace show {shlex.quote(str(traces))}"
        f"\n  open {shlex.quote(str(merged))} in https://ui.perfetto.dev"
    )
    if missing:
        print(f"\nFor a picture and for TensorBoard, install {' and '.join(missing)}: pip install 'torchbagua[demo]'")
    else:
        print(f"  {_program('tensorboard')} --logdir {shlex.quote(str(traces.parent))}")
    return 0 if comparison.losses_agree else 1


def _program(name: str) -> str:
    """Returns how the user calls a program of this environment, which may not be on PATH."""
    return name if shutil.which(name) else shlex.quote(str(Path(sys.executable).with_name(name)))


def _raise_signal(number: int, _: FrameType | None) -> None:
    raise SignalException(f"got signal {number}", signal.Signals(number))


def _choose_network(parser: argparse.ArgumentParser, rate_mbit: int | None) -> tuple[int, str]:
    """Returns the rate of the network, 0 for loopback, and a description. `rate_mbit` is None if none was given."""
    if rate_mbit == 0:
        return 0, "loopback"
    reason = why_unavailable()
    if reason is None:
        rate_mbit = rate_mbit or _DEFAULT_RATE_MBIT
        return rate_mbit, f"{rate_mbit} Mbit/s for each rank, emulated"
    if rate_mbit is not None:
        parser.error(
            f"argument --rate: got '{rate_mbit}', allowed: 0, since this machine cannot emulate a network: {reason}"
        )
    return 0, f"loopback, so steps are not faster. This machine cannot emulate a network: {reason}"


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a type for argparse, which puts the option's name before the message."""

    def parse(value: str) -> int:
        if not value.isascii() or not value.isdigit() or not lowest <= int(value) <= highest:
            raise argparse.ArgumentTypeError(f"got {value!r}, allowed: an integer from {lowest} to {highest}")
        return int(value)

    return parse
