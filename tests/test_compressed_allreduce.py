"""CompressedAllReduceAlgorithm: any codec, codecs on two levels, and errors. Other files test 4 bits."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch

import oracle
import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs import MinMaxUInt4, Sign1Bit
from training import Run, Tower, build, flat, train


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


def test_in_8_bits_it_is_bytegrad() -> None:
    def run(algorithm: tb.Algorithm) -> Run:
        model = build(Tower)
        return run_ranks(2, lambda group: train(group, model, algorithm))[0]

    own, of_bytegrad = map(
        run, (tb.Algorithm.init("compressed_allreduce", compression="minmax_uint8"), tb.ByteGradAlgorithm())
    )
    for name, weight in own.weights.items():
        assert torch.equal(weight, of_bytegrad.weights[name]), name


def test_it_is_printed_and_pickled() -> None:
    algorithm = tb.CompressedAllReduceAlgorithm(MinMaxUInt4(64), error_feedback=True)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert repr(algorithm) == (
        "CompressedAllReduceAlgorithm(compression=MinMaxUInt4(block=64), hierarchical=True, average=True, "
        "intra_compression=None, error_feedback=True)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"compression": "uint4"},
            r"compression must be None, a Compressor or one of \[.*'minmax_uint4', .*got 'uint4'",
        ),
        ({"compression": 4}, "compression must be None, a Compressor or one of .*got 4"),
        ({"intra_compression": "uint4"}, "intra_compression must be None, a Compressor or one of .*got 'uint4'"),
        (
            {"intra_compression": "minmax_uint8", "hierarchical": False},
            "intra_compression must be None with hierarchical=False, .*got 'minmax_uint8'",
        ),
        ({"compression": Sign1Bit(8)}, r"compression Sign1Bit\(block=8\) needs error_feedback=True"),
        ({"intra_compression": "topk"}, "intra_compression must not be a codec that needs error feedback"),
        ({"average": 1}, "average must be True or False, got 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^CompressedAllReduceAlgorithm: {message}"):
        tb.CompressedAllReduceAlgorithm(**arguments)
