"""Codecs in algorithms other than means of gradients: equal to the oracle, or refused by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from averaging import Normed
from averaging import train as train_averaging
from q_adam_life import NUM_STEPS, Average, Life, Trainer, check_lives, initial_of
from ranks import gloo_group, run_ranks
from test_decentralized import check_low_precision
from torchbagua.codecs import BlockK, Compressor, Identity, MinMaxUInt8, Sign1Bit, TopK, WireLayout
from torchbagua.codecs.base import pad_bytes
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameters import BaguaTensor
from training import Tower, build


@dataclass(frozen=True)
class Sixteenths(Compressor):
    """A user's own codec: multiples of 1/16 in a byte each; -128 is NaN or Inf."""

    def wire_bytes(self, num_elements: int, num_blocks: int, dtype: torch.dtype) -> int:
        return pad_bytes(num_elements)

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        for elements, own_bytes in zip(layout.elements, layout.byte_slices, strict=True):
            x_L = x_N[elements].float()
            codes = (x_L * 16).round().clamp(-127, 127).where(x_L.isfinite(), -128).to(torch.int8)
            wire_W[own_bytes][: len(codes)] = codes.view(torch.uint8)

    def decode(self, wire_W: torch.Tensor, layout: WireLayout, x_N: torch.Tensor) -> None:
        for elements, own_bytes in zip(layout.elements, layout.byte_slices, strict=True):
            x_L = x_N[elements]
            codes = wire_W[own_bytes][: len(x_L)].view(torch.int8)
            x_L.copy_((codes / 16).where(codes > -128, torch.nan))


def sixteenths(x: oracle.Array) -> oracle.Array:
    return np.clip(oracle.rne(x * oracle.F32(16)), -127, 127).astype(oracle.F32) / oracle.F32(16)


def cast(dtype: torch.dtype) -> oracle.Coded:
    return lambda x: torch.from_numpy(x).to(dtype).float().numpy()


CODECS: dict[str, tuple[str | Compressor, int, oracle.Coded]] = {
    "4 bits": ("minmax_uint4", 128, oracle.quantise_block_4_bits),
    "8 bits, of other blocks": (MinMaxUInt8(64), 64, oracle.quantise_block),
    "bfloat16": ("bfloat16", 2048, cast(torch.bfloat16)),
    "float16": ("float16", 2048, cast(torch.float16)),
    "own": (Sixteenths(), 2048, sixteenths),
}


@pytest.mark.parametrize("codec", ["4 bits", "float16", "own"])
def test_qadam_sends_momenta_in_any_codec(codec: str) -> None:
    model = build(Tower)
    compression, *coding = CODECS[codec]

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model)
        impl = trainer.hook(compression=compression)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    def make_average(size: int, nodes: Any) -> Average:
        return lambda rows: oracle.bytegrad(rows, [size], nodes, *coding)

    check_lives(run_ranks(2, body), initial_of(model), None, make_average)


@pytest.mark.parametrize(
    ("codec", "nodes"),
    [
        ("4 bits", None),
        ("bfloat16", None),
        ("own", None),
        ("8 bits, of other blocks", [0, 0, 1, 1]),
        ("own", [0, 0, 1, 1]),
    ],
)
def test_the_ring_sends_changes_in_any_codec(codec: str, nodes: list[int] | None) -> None:
    compression, *coding = CODECS[codec]
    algorithm = tb.LowPrecisionDecentralizedAlgorithm(compression=compression)
    model = build(Normed)
    traces = run_ranks(3 if nodes is None else 4, lambda group: train_averaging(group, model, algorithm, nodes=nodes))
    check_low_precision(traces, 1, nodes, *coding)


def test_the_ring_of_nodes_keeps_its_shards_with_blocks_of_any_size() -> None:
    """Blocks of 24 or of 3 * 2048 elements affect only the rounding."""
    model = build(Normed)

    def weights(compression: Compressor | None) -> list[torch.Tensor]:
        algorithm = tb.LowPrecisionDecentralizedAlgorithm(compression=compression)
        traces = run_ranks(
            4, lambda group: train_averaging(group, model, algorithm, nodes=[0, 0, 1, 1], num_steps=3, lr=1e-3)
        )
        return [trace.start[-1]["first.weight"] for trace in traces]

    exact = weights(None)
    for block in (24, 6144):
        for found, expected in zip(weights(MinMaxUInt8(block)), exact, strict=True):
            assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def qadam(compression: Any, **options: Any) -> tb.QAdamAlgorithm:
    adam = tb.QAdamOptimizer([torch.nn.Parameter(torch.zeros(1))])
    return tb.QAdamAlgorithm(adam, compression=compression, **options)


def ring(compression: Any) -> BaguaBucket:
    own, weight = tb.BaguaProcessGroup(gloo_group(dist.HashStore(), 0, 1)), torch.zeros(5)
    bucket = BaguaBucket("bucket", [BaguaTensor("weight", weight)], own, weight)
    return bucket.append_low_precision_decentralized_synchronous_op(*torch.zeros(3, 5), compression=compression)


PART = "must not be a codec that sends only part of the elements, .*got "
REFUSED = [
    (qadam, "topk", f"QAdamAlgorithm: compression {PART}'topk'"),
    (qadam, BlockK(), rf"QAdamAlgorithm: compression {PART}BlockK\(block=2048, ratio=0.01\)"),
    (qadam, None, "QAdamAlgorithm: compression must not be full precision, .*got None"),
    (qadam, Identity(), r"QAdamAlgorithm: compression must not be full precision, .*got Identity\(\)"),
    (qadam, "int4", "QAdamAlgorithm: compression must be None, a Compressor or one of .*got 'int4'"),
    (qadam, Sign1Bit(8), r"QAdamAlgorithm: compression Sign1Bit\(block=8\) needs error_feedback=True"),
    *(
        (construct, compression, f"{name}: compression must ")
        for construct, name in {
            tb.LowPrecisionDecentralizedAlgorithm: "LowPrecisionDecentralizedAlgorithm",
            tb.AsyncModelAverageAlgorithm: "AsyncModelAverageAlgorithm",
            ring: "append_low_precision_.*",
        }.items()
        for compression in ("sign1bit", "topk", Sign1Bit(8), TopK(), "blockk", "int4")
    ),
]


def test_codecs_that_are_refused() -> None:
    for construct, compression, message in REFUSED:
        with pytest.raises(ValueError, match=f"^{message}"):
            construct(compression=compression)


def test_ranks_that_spell_a_codec_differently_agree() -> None:
    """One rank uses Bagua's alias. Algorithms, saved states and traces have the canonical spelling."""

    def body(group: dist.ProcessGroup) -> None:
        spelling = ["MinMaxUInt8", "minmax_uint8"][group.rank()]
        for algorithm in (
            tb.CompressedAllReduceAlgorithm(spelling, intra_compression=spelling),
            qadam(spelling, error_feedback=True),
            tb.LowPrecisionDecentralizedAlgorithm(compression=spelling),
            tb.AsyncModelAverageAlgorithm(compression=spelling),
            tb.DiLoCoAlgorithm(compression=spelling),
        ):
            assert "='minmax_uint8'" in repr(algorithm)
            impl = algorithm.reify(group)
            assert "MinMaxUInt8" not in str(algorithm.state_arguments(impl.process_group))
            impl.close()

    run_ranks(2, body)
