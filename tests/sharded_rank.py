"""Runs cases of sharded modules on one rank: gradients, averaged weights and other checks. Started by torchrun.

Arguments: "nccl" for ranks that share one GPU; the names of the cases.
"""

import sys
from datetime import timedelta

import torch

import sharded_checks
import sharded_gradients
import sharded_weights
from one_gpu import begin_rank
from rank_cases import run_cases


def main() -> None:
    backend, *names = sys.argv[1:] if sys.argv[1] == "nccl" else ["gloo", *sys.argv[1:]]
    device = begin_rank(backend, timedelta(seconds=60))
    torch.set_num_threads(1)

    def run(name: str) -> None:
        if name in sharded_gradients.CASES:
            sharded_gradients.train(name, device)
        else:
            {**sharded_checks.CHECKS, **sharded_weights.CHECKS}[name]()

    run_cases(names, run)


if __name__ == "__main__":
    main()
