"""CompressedAllReduceAlgorithm: any codec, codecs on two levels, and errors. Other files test 4 bits."""

from functools import partial
from typing import Any

import pytest
import torch

import oracle
import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs import MinMaxUInt4, Sign1Bit, TopK
from training import Tower, build, flat, train


def test_two_levels_equal_the_oracle() -> None:
    nodes = [0, 0, 1, 1]
    algorithm = tb.CompressedAllReduceAlgorithm(MinMaxUInt4(block=8), intra_compression="minmax_uint8")
    model = build(Tower)
    runs = run_ranks(4, lambda group: train(group, model, algorithm, nodes=nodes, num_steps=2, bucket_cap_mb=0.01))
    for step, averaged in enumerate(runs[0].averaged):
        for name, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"replicas differ in {name}"
            rows = [flat(run.local[step][name]) for run in runs]
            within = partial(oracle.quantise, segments=[rows[0].size])
            expected = oracle.bytegrad(rows, [rows[0].size], nodes, 8, oracle.quantise_block_4_bits, within)
            assert torch.equal(gradient.flatten(), torch.from_numpy(expected)), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "uint4"}, r"compression must be None, .* or one of \[.*'minmax_uint4', .*got 'uint4'"),
        ({"compression": 4}, "compression must be None, a Compressor or one of .*got 4"),
        ({"intra_compression": "uint4"}, "intra_compression must be None, a Compressor or one of .*got 'uint4'"),
        (
            {"intra_compression": "minmax_uint8", "hierarchical": False},
            "intra_compression must be None with hierarchical=False, .*got 'minmax_uint8'",
        ),
        *(
            ({"compression": codec}, "compression .* needs error_feedback=True")
            for codec in (Sign1Bit(8), TopK(ratio=0.1), "topk", "blockk")
        ),
        ({"intra_compression": "topk"}, "intra_compression must not be a codec that needs error feedback"),
        ({"average": 1}, "average must be True or False, got 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^CompressedAllReduceAlgorithm: {message}"):
        tb.CompressedAllReduceAlgorithm(**arguments)
