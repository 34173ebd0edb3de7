"""Starts the ranks of the demo with torchrun's launcher."""

import contextlib
import json
import logging
import signal
import sys
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchbagua.cli.demo import train
from torchbagua.cli.namespaces import SMALL_BURST, EmulatedNetwork, remove_stale_namespaces


def launch(settings: train.Settings) -> list[train.Run]:
    """Runs `torchbagua/cli/demo/train.py` in `settings.nproc` processes, as `torchrun --standalone` would.

    If `settings.rate_mbit` is not 0, each process runs in a network namespace.

    Returns:
        the result of `train_rank`.

    Raises:
        ChildFailedError: a rank raised or died; the error contains its traceback. The other ranks have exited.
        KeyboardInterrupt, SignalException: this process received a signal. All ranks have exited.
        NetworkError: the network could not be emulated.
    """
    logging.disable(logging.WARNING)  # after Ctrl-C, the launcher would report each process that it ends
    network, prefix = None, []
    if settings.rate_mbit:
        remove_stale_namespaces()
        network = EmulatedNetwork([0] * settings.nproc, rank_rate=f"{settings.rate_mbit}mbit", burst=SMALL_BURST)
        prefix = _enter(network)
    with tempfile.TemporaryDirectory(prefix="torchbagua-demo-") as folder, network or contextlib.nullcontext():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # by default ranks rendezvous at this machine's host name, which may not resolve
            max_restarts=0,
            signals_to_handle=",".join(name.name for name in handled_signals()),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        output = Path(folder, "runs.json")
        # In arguments, the launcher replaces names after a dollar sign.
        written = json.dumps(asdict(settings)).replace("$", "$$")
        # Not with -m, which would import a package in the current folder, such as that of a clone.
        command: list[str] = [*prefix, sys.executable, train.__file__, written, str(output)]
        elastic_launch(config, command[0])(*command[1:])
        return [train.Run(**run) for run in json.loads(output.read_text(encoding="utf-8"))]


def handled_signals() -> list[signal.Signals]:
    """Returns the signals after which the demo ends its ranks, and deletes their network.

    Not those that this process ignores from the start, such as SIGHUP after nohup. SIGINT is not one of them: the
    launcher would forward it to the ranks, and each would print a traceback. Python's default handler ends the
    launcher, which then ends the ranks with SIGTERM.
    """
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


def _enter(network: EmulatedNetwork) -> list[str]:
    """Returns the words before Python in the command of a rank, which then runs in its namespace.

    `ip` and `env` replace themselves by the program that they run, so the launcher supervises that program.
    """
    variables = {
        # From its namespace, a rank cannot reach the launcher's store. Instead, rank 0 creates a store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise the store warns that it cannot look up the name of an address
    }
    inside = ["ip", "netns", "exec", network.namespace(macros.local_rank)]
    return [*inside, "env", *(f"{name}={value}" for name, value in variables.items())]
