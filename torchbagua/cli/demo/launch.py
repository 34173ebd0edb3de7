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


def launch(settings: train.Settings) -> list[train.Run]:
    """Runs `python -m torchbagua.cli.demo.train` in `settings.nproc` processes, as `torchrun --standalone` would.

    Returns:
        what `train_rank` returned.

    Raises:
        ChildFailedError: a rank raised or died; has its traceback. The other ranks have ended.
        KeyboardInterrupt, SignalException: this process was told to end. All ranks have ended.
    """
    logging.disable(logging.WARNING)  # Ctrl-C would have the launcher report each process that it ends
    # But for what this process was started to ignore, as nohup has it ignore SIGHUP. Not SIGINT: the launcher would
    # hand it on to the ranks, which would each print where it met them. Left to Python, it ends the launcher, which
    # ends the ranks by SIGTERM.
    handled = [
        one for one in ("SIGTERM", "SIGHUP", "SIGQUIT") if signal.getsignal(signal.Signals[one]) != signal.SIG_IGN
    ]
    with tempfile.TemporaryDirectory(prefix="torchbagua-demo-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # the ranks would meet at this machine's host name, which need not resolve
            max_restarts=0,
            signals_to_handle=",".join(handled),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        output = Path(folder, "runs.json")
        elastic_launch(config, sys.executable)("-m", train.__name__, json.dumps(asdict(settings)), str(output))
        return [train.Run(**run) for run in json.loads(output.read_text(encoding="utf-8"))]
