"""How often the host asks the device for a number: on a GPU it waits each time."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import torchbagua as tb
from ranks import run_ranks
from training import Tower, build

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
NUM_WARM = 3


class CountingReads(TorchFunctionMode):
    """Counts the numbers, or tensors of numbers, that the host reads of tensors on this thread."""

    num_reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arguments", [{}, {"error_feedback": True}], ids=str)
def test_reads_of_a_step_do_not_grow_with_the_parameters(device: torch.device, arguments: dict[str, Any]) -> None:
    """With error feedback it looks at all gradients at once, which of them have been averaged; else at nothing."""
    model = build(lambda: Tower((10,) * 12)).to(device)

    def body(group: dist.ProcessGroup) -> list[int]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = tb.QAdamOptimizer(ddp.parameters(), warmup_steps=NUM_WARM, fused=True)
        reads = []
        with tb.attach(ddp, optimizer, tb.QAdamAlgorithm(optimizer, **arguments)):
            for _ in range(2 * NUM_WARM):
                loss = ddp(torch.ones(2, 10, device=device), 0).square().sum()
                with CountingReads() as counting:
                    loss.backward()
                    optimizer.step()
                reads.append(counting.num_reads)
                optimizer.zero_grad()
        return reads

    for reads in run_ranks(2, body, device=device):
        assert reads[:NUM_WARM] == [0] * NUM_WARM
        assert max(reads[NUM_WARM:]) <= (2 if arguments else 0)
