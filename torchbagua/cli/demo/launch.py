"""Starts the ranks of the demo with torchrun's launcher."""

import json
import logging
import signal
import sys
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchbagua.cli.demo import train


def launch(settings: train.Settings) -> list[train.Run]:
    """Runs `python -m torchbagua.cli.demo.train` in `settings.nproc` processes, as `torchrun --standalone` would.

    Returns:
        the result of `train_rank`.

    Raises:
        ChildFailedError: a rank raised or died; the error contains its traceback. The other ranks have exited.
        KeyboardInterrupt, SignalException: this process received a signal. All ranks have exited.
    """
    logging.disable(logging.WARNING)  # after Ctrl-C, the launcher would report each process that it ends
    # Except signals that this process ignores from the start, such as SIGHUP after nohup. SIGINT is not listed: the
    # launcher would forward it to the ranks, and each would print a traceback. Python's default handler ends the
    # launcher, which then ends the ranks with SIGTERM.
    handled = [
        name for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    ]
    with tempfile.TemporaryDirectory(prefix="torchbagua-demo-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # by default ranks rendezvous at this machine's host name, which may not resolve
            max_restarts=0,
            signals_to_handle=",".join(handled),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        output = Path(folder, "runs.json")
        elastic_launch(config, sys.executable)("-m", train.__name__, json.dumps(asdict(settings)), str(output))
        return [train.Run(**run) for run in json.loads(output.read_text(encoding="utf-8"))]
