"""Starts the ranks of the demo through torchrun's own launcher."""

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
from torchbagua.cli.demo.train import Run, Settings


def launch(settings: Settings) -> list[dict[str, Run]]:
    """Runs `python -m torchbagua.cli.demo.train` in `settings.nproc` processes, as `torchrun --standalone` would.

    Returns:
        what `train_rank` returned on each rank.

    Raises:
        ChildFailedError: a rank raised or died; has its traceback. The other ranks have ended.
        KeyboardInterrupt, SignalException: this process was told to end. All ranks have ended.
    """
    # Ctrl-C would have the launcher report each process that it ends.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="torchbagua-demo-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            # Without it the ranks would meet at this machine's host name, which need not resolve.
            local_addr="localhost",
            max_restarts=0,
            # Not SIGINT: the launcher would hand it on to the ranks, which would each print where it met them. Left to
            # Python, it ends the launcher, which ends the ranks by SIGTERM.
            signals_to_handle=",".join(_signals_to_handle()),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        command = ["-m", train.__name__, json.dumps(asdict(settings)), folder]
        elastic_launch(config, sys.executable)(*command)
        return [train.read_runs(Path(folder), rank) for rank in range(settings.nproc)]


def _signals_to_handle() -> list[str]:
    """All but those that this process was started to ignore, as nohup has it ignore SIGHUP."""
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return [one.name for one in ending if signal.getsignal(one) is not signal.SIG_IGN]
