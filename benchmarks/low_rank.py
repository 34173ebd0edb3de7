"""Times the computation of a PowerSGD step for one matrix: torch's two products, and our kernels, in one run.

    python benchmarks/low_rank.py [--threads 1 2] [--rounds 15] [--json PATH]

They take turns, and a time is a median over the rounds. A step orthonormalizes both factors. The last column is the
time of this, as a fraction of the time of the two products. P Q^T is timed together with its subtraction from the
residual.
"""

import statistics
from functools import partial

import torch

from environment import make_parser, write_record
from table import table
from timing import alternated, elapsed_ms
from torchbagua import native
from torchbagua.collectives.low_rank_mean import FactorPlace, MatrixShape, Orthogonaliser, product_table

CPU = torch.device("cpu")
SHAPES = [(1024, 1024, 4), (3072, 768, 4), (3072, 768, 32), (1_000_000, 64, 4), (100_000, 768, 4), (30_000, 768, 64)]


def main() -> None:
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    arguments = parser.parse_args()
    native.load()
    results, rows = [], []
    for num_threads in dict.fromkeys(arguments.threads):
        torch.set_num_threads(num_threads)
        for num_rows, columns, rank in SHAPES:
            matrix = torch.randn(num_rows, columns)
            left, right = torch.randn(rank, num_rows), torch.randn(rank, columns)
            of_left = Orthogonaliser([FactorPlace(0, rank, num_rows)], CPU)
            of_right = Orthogonaliser([FactorPlace(0, rank, columns)], CPU)
            product = partial(torch.ops.torchbagua.low_rank_product, left.view(-1), right.view(-1))
            parts = {
                "M Q": partial(torch.mm, right, matrix.t(), out=torch.empty_like(left)),
                "M^T P": partial(torch.mm, left, matrix, out=torch.empty_like(right)),
                "orth(P)": partial(of_left, left.clone().view(-1)),
                "orth(Q)": partial(of_right, right.clone().view(-1)),
                "P Q^T": partial(
                    product,
                    product_table(MatrixShape(num_rows, columns, rank)),
                    torch.empty(matrix.numel()),
                    matrix.clone().view(-1),
                ),
            }
            timed = {name: partial(elapsed_ms, CPU, part) for name, part in parts.items()}
            ms = {name: statistics.median(values) for name, values in alternated(timed, arguments.rounds).items()}
            share = (ms["orth(P)"] + ms["orth(Q)"]) / (ms["M Q"] + ms["M^T P"])
            results.append({"num_threads": num_threads, "shape": (num_rows, columns, rank), "ms": ms})
            shape = f"{num_rows:,} x {columns}"
            rows.append([str(num_threads), shape, str(rank), *(f"{time:.2f}" for time in ms.values()), f"{share:.2f}"])
    print(table(["threads", "matrix", "rank", *(f"{part}, ms" for part in ms), "orth / products"], rows))
    write_record(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
