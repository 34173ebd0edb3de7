"""The two-phase mean of several ranks, run by a group of one rank, which normally skips it.

A group of one rank communicates nothing, and its impl returns immediately. This algorithm still encodes, reduces and
decodes, without messages to other ranks, to measure on one GPU what these steps cost during backward.
"""

from dataclasses import dataclass

import torch

import torchbagua as tb
from torchbagua.codecs import Compressor, MinMaxUInt8
from torchbagua.collectives.mean import TwoPhaseMean
from torchbagua.collectives.process_group import BaguaProcessGroup


def make_mean(group: BaguaProcessGroup, compressor: Compressor, bucket: tb.extend.BaguaBucket) -> TwoPhaseMean:
    """Return the collective of one bucket. Only this function depends on its constructor."""
    return TwoPhaseMean(group.world, compressor, bucket.spec, float(group.size))


@dataclass(frozen=True)
class WholeByteGradAlgorithm(tb.Algorithm):
    """ByteGrad that also compresses with one rank: gradients become Q(Q(g))."""

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return _WholeByteGradImpl(runner)


class _WholeByteGradImpl(tb.AlgorithmImpl):
    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        self._compressor = MinMaxUInt8()

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        mean = make_mean(self.runner.process_group, self._compressor, bucket)

        def whole_mean(bucket: tb.extend.BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat)

        bucket.append_python_op(whole_mean)
