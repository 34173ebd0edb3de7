"""Scripts that end without detach: the interpreter first ends the lanes, and the process exits normally."""

from pathlib import Path

import pytest

import programs

SCRIPT = """
import sys, torch, torch.distributed as dist
import torchbagua as tb

dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attachment = tb.attach(model, optimizer, {algorithm})
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        "tb.DecentralizedAlgorithm()",
        "tb.AsyncModelAverageAlgorithm(sync_interval_ms=5)",  # its lane is always active
    ],
)
def test_exit_without_detach(algorithm: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(algorithm=algorithm))
    done = programs.run(programs.torchrun(script))
    num_warned = done.stderr.count("was not detached, and can no longer be: ranks are left with")
    # A rank that still trains when the other ends is notified of that, and does not warn at its own exit.
    assert num_warned >= 1
    assert num_warned + done.stderr.count("has left the training") == 2
