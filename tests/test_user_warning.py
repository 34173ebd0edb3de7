"""Where warnings point: at the line of the package's user."""

import copy
import linecache
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua._warnings import warn_user
from torchbagua.native import loader
from training import Tower, build


def line_of(warned: pytest.WarningsRecorder) -> str:
    """Return the line of this file that the only warning points at."""
    (warning,) = warned
    assert warning.filename == __file__
    return linecache.getline(__file__, warning.lineno).strip()


class Failing:
    """An observer that raises."""

    def on_comm(self, event: tb.observe.CommEvent) -> None:
        raise KeyError("of the user's")


def test_an_observer_that_fails_in_a_hook_of_the_optimizer() -> None:
    """Torch's frames are between the user's line and the package."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, tb.ByteGradAlgorithm(), observers=[Failing()]):
            ddp(torch.ones(2, 10), 0).sum().backward()
            optimizer.step()  # here

    with pytest.warns(RuntimeWarning, match="observer Failing failed") as warned:
        run_ranks(1, body)
    assert line_of(warned) == "optimizer.step()  # here"


def test_the_reference_kernels_that_an_optimizer_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "loaded_path", lambda kernels: None)
    monkeypatch.setattr(loader, "choose", lambda kernels: loader.Choice("reference", "a test wants it"))
    loader._warn_of_reference.cache_clear()
    parameters = build(Tower).parameters()
    with pytest.warns(RuntimeWarning, match="runs its reference kernels for cpu") as warned:
        tb.QAdamOptimizer(parameters)  # here
    assert line_of(warned) == "tb.QAdamOptimizer(parameters)  # here"


def test_a_thread_of_the_package_has_no_line_of_the_user() -> None:
    inside = str(Path(tb.__file__).with_name("lane.py"))
    namespace = {"warn_user": warn_user}
    exec(compile("def run(): warn_user('of a thread')", inside, "exec"), namespace)

    def run_on_thread() -> None:
        thread = threading.Thread(target=namespace["run"])
        thread.start()
        thread.join()

    with pytest.warns(RuntimeWarning, match="of a thread") as warned:
        run_on_thread()
    assert [warning.filename for warning in warned] == [inside]
