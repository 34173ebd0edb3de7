"""The control of asynchronous averaging: torch's own all-reduce sends as many bytes during training, without a use."""

import threading

import torch
import torch.distributed as dist


class BackgroundAllReduce:
    """Between `resume` and `pause`, repeatedly sums a tensor over all ranks on a separate thread.

    The constructor and both methods are collective.

    Args:
        num_elements: number of elements of the tensor, float32.
        interval_s: pause between two sums.
    """

    def __init__(self, num_elements: int, interval_s: float) -> None:
        self._group = dist.new_group()  # the training thread's group is not shared
        self._values = torch.zeros(num_elements)
        self._interval_s = interval_s
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        self._stops.clear()
        self._thread = threading.Thread(target=self._run, name="background-all-reduce", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Continue until all ranks have called this, as asynchronous averaging does."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._stops.wait(self._interval_s)
            all_stop = torch.tensor(float(self._stops.is_set()))
            dist.all_reduce(all_stop, op=dist.ReduceOp.MIN, group=self._group)
            if all_stop:
                return
            dist.all_reduce(self._values, group=self._group)
