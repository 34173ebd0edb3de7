"""Cases of a program that ranks run: rank 0 prints the names of passed cases for the test that started it."""

from collections.abc import Callable, Iterable

import torch.distributed as dist


def run_cases(names: Iterable[str], run: Callable[[str], object]) -> None:
    """Run the cases with these names on all ranks, one after the other, and end the job."""
    for name in names:
        run(name)
        if dist.get_rank() == 0:
            print(f"right: {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
