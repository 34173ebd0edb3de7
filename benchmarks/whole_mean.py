"""The two-phase mean as several ranks run it, for a group of one, which is otherwise spared it.

A group of one communicates nothing, and its impl returns at once. To see on one GPU what encoding, the reduction and
decoding cost beside backward, this algorithm runs them all the same; of messages to other ranks there are none.
"""

from dataclasses import dataclass

import torch

import torchbagua as tb
from torchbagua.codecs import Compressor, MinMaxUInt8
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.two_phase_mean import TwoPhaseMean


def make_mean(group: BaguaProcessGroup, compressor: Compressor, bucket: tb.BaguaBucket) -> TwoPhaseMean:
    """The collective of one bucket: the one place here that knows how it is made."""
    return TwoPhaseMean(group.world, compressor, bucket.spec, float(group.size))


@dataclass(frozen=True)
class WholeByteGradAlgorithm(tb.Algorithm):
    """ByteGrad that compresses with one rank, too: gradients become Q(Q(g))."""

    def make_impl(self, runner: tb.Runner) -> tb.AlgorithmImpl:
        return _WholeByteGradImpl(runner)


class _WholeByteGradImpl(tb.AlgorithmImpl):
    def __init__(self, runner: tb.Runner) -> None:
        super().__init__(runner)
        self._compressor = MinMaxUInt8()

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        mean = make_mean(self.runner.process_group, self._compressor, bucket)

        def whole_mean(bucket: tb.BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat)

        bucket.append_python_op(whole_mean)
