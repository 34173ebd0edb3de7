"""RandomK: gradients averaged by elements of each block that all ranks draw alike."""

from dataclasses import KW_ONLY, dataclass, replace

import torch

from torchbagua.algorithms.base import check_flags, register
from torchbagua.algorithms.gradient.backward_count import CountingImpl
from torchbagua.algorithms.gradient.compressed_all_reduce import (
    CompressedAllReduceAlgorithmImpl,
    CompressedMeanAlgorithm,
)
from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.randomk import RandomK, check_seed
from torchbagua.codecs.sparse import check_ratio, check_sparse_block
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket


@dataclass(frozen=True)
class RandomKAlgorithm(CompressedMeanAlgorithm):
    """Average gradients by elements of each block that are drawn at random, with error feedback, for SGD.

    It is `TopKAlgorithm`, but for what is sent: elements that all ranks draw alike, others in each step. So no indices
    travel, the mean is of the same elements of all ranks, and a rank sends half the bytes: about 2 (n-1)/n of
    `ratio * 1.2` an element and step, at 0.01 330 times less than what a float32 all-reduce sends. The rest is added to
    what is sent next (random-k with memory, Stich, Cordonnier and Jaggi, arXiv 1809.07599). The result is bit-identical
    on all ranks.

    An element waits for `1 / ratio` steps on average, however large it is, so more is lost by waiting than with the
    largest elements. Values are not divided by `ratio`: with error feedback nothing is lost that this would make up
    for, and residuals would grow without bound.

    - The draws do not depend on how DDP forms its buckets, nor on the number of ranks. Behind the plain hook that is so
      if `reify` was given the optimizer.
    - Accumulate under `no_sync`. Of several synchronised backward passes before a step, those are lost for a parameter
      of which only zeros were drawn.
    - The number of backward passes, by which they are drawn, is in `Attachment.state_dict`. A resumed run draws what
      the run would have drawn.

    Args:
        ratio: the share of elements that is sent, above 0 and at most 1.
        seed: of the draws, an integer.
        hierarchical: with several nodes of several ranks: full precision within nodes, the drawn ones between them.
        average: divide by the number of ranks; False gives the sum.
        block: how many elements they are drawn of, a multiple of 8 from 8 to 4096. A block does not cross a parameter's
            boundary, and at least one element of each is sent.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    ratio: float = 0.01
    _: KW_ONLY
    seed: int = 0
    hierarchical: bool = True
    average: bool = True
    block: int = DEFAULT_BLOCK

    error_feedback = True  # and no argument: nearly everything is left out

    def __post_init__(self) -> None:
        check_flags(self, "hierarchical", "average")
        check_seed("RandomKAlgorithm", self.seed)
        check_ratio("RandomKAlgorithm", self.ratio)
        check_sparse_block("RandomKAlgorithm", self.block)

    def make_compressors(self) -> tuple[Compressor, Compressor]:
        return RandomK(self.block, self.ratio, self.seed), Identity()

    def make_impl(self, process_group: BaguaProcessGroup) -> "RandomKAlgorithmImpl":
        return RandomKAlgorithmImpl(process_group, self)


class RandomKAlgorithmImpl(CountingImpl, CompressedAllReduceAlgorithmImpl):
    """See `RandomKAlgorithm`."""

    def _append_mean(self, bucket: BaguaBucket, codec: Compressor, feedback: TwoPhaseResiduals | None = None) -> None:
        if isinstance(codec, RandomK):
            step = torch.zeros(1, dtype=torch.int64, device=bucket.flat.device)
            codec = replace(codec, step=step)

            def tell_step(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
                step.fill_(self.num_backward_passes)

            bucket.append_python_op(tell_step)
        super()._append_mean(bucket, codec, feedback)


register("randomk", RandomKAlgorithm, "mean of randomly drawn elements of gradients, for SGD")
