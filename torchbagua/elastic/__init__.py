"""Elastic training: ranks may fail, leave and join, and the others go on. Its interface may still change."""

from torchbagua.elastic.generations import NoProgressError, Run, run
from torchbagua.elastic.members import EvictedError, NoQuorumError
from torchbagua.elastic.sampler import Sampler

__all__ = ["EvictedError", "NoProgressError", "NoQuorumError", "Run", "Sampler", "run"]
