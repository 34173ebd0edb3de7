"""Times QAdamOptimizer's step after its warm-up and torch's fused Adam, on the same parameters, in one run.

    python benchmarks/optimizer.py [--threads 1 2] [--rounds 31] [--json PATH]

They take turns, and a time is a median over the rounds. The floor is a copy of as many bytes as the step reads and
writes: gradient, second moment, momentum and weight are read, momentum and weight written, 24 bytes per float32
parameter. Adam also writes the second moment: 28 bytes. Only the step is timed, without the mean of the momentum.
"""

import copy
import statistics
from functools import partial

import torch
from torch import nn

from environment import make_parser, write_record
from table import table
from timing import alternated, elapsed_ms
from torchbagua import QAdamOptimizer

WIDTH, NUM_LAYERS = 512, 8
QADAM_BYTES_PER_PARAMETER = 24


class Averager:
    """Replaces the algorithm that averages momenta."""


def build_model() -> nn.Module:
    """Return transformer layers with 25 M parameters in total, matrices and vectors."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def main() -> None:
    parser = make_parser(__doc__, rounds=31)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    arguments = parser.parse_args()
    model = build_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = torch.zeros(num_parameters * QADAM_BYTES_PER_PARAMETER // 8)  # float32, read once and written once
    target = torch.zeros_like(source)
    averager = Averager()

    def with_gradients() -> nn.Module:
        own = copy.deepcopy(model)
        for parameter, original in zip(own.parameters(), model.parameters(), strict=True):
            parameter.grad = original.grad
        return own

    adams = {
        "Adam, fused": torch.optim.Adam(with_gradients().parameters(), fused=True),
        "Adam": torch.optim.Adam(with_gradients().parameters()),
        "QAdam past its warm-up": QAdamOptimizer(with_gradients().parameters(), warmup_steps=1),
    }
    for adam in adams.values():
        if isinstance(adam, QAdamOptimizer):
            adam.attach_averager(averager)
        adam.step()
        adam.step()
    steps = {"copy": partial(target.copy_, source)} | {name: adam.step for name, adam in adams.items()}
    timed = {name: partial(elapsed_ms, torch.device("cpu"), step) for name, step in steps.items()}
    results, rows = [], []
    for num_threads in dict.fromkeys(arguments.threads):
        torch.set_num_threads(num_threads)
        ms = {name: statistics.median(values) for name, values in alternated(timed, arguments.rounds).items()}
        results.append({"num_threads": num_threads, "ms": ms})
        for name, value in ms.items():
            ratios = value / ms["Adam, fused"], value / ms["copy"]
            rows.append([str(num_threads), name, *(f"{number:.2f}" for number in (value, *ratios))])
    print(f"{num_parameters / 1e6:.1f} M parameters in {len(list(model.parameters()))} tensors, float32\n")
    print(table(["threads", "step", "ms", "x fused Adam", "x copy of QAdam's bytes"], rows))
    write_record(arguments.json, {"num_parameters": num_parameters, "results": results})


if __name__ == "__main__":
    main()
