"""Elastic training: ranks may leave, fail and join, and the others go on."""

from torchbagua.elastic.generations import Run, run
from torchbagua.elastic.sampler import Sampler

__all__ = ["Run", "Sampler", "run"]
