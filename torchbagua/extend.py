"""For authors of algorithms: the parts of which an algorithm consists. Most programs need none of these names.

Codecs are in `torchbagua.codecs`, transports in `torchbagua.transport`, observers in `torchbagua.observe`, and tests of
all of them in `torchbagua.testing`.
"""

from torchbagua.algorithms.base import Algorithm, register
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.algorithms.gradient.function import mean
from torchbagua.collectives.topology import Topology
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.lockstep import Lockstep
from torchbagua.runtime.parameter_state import BucketState, ParameterState, residual_state
from torchbagua.runtime.parameters import BaguaTensor
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_buckets import WeightBucket, WeightBuckets, WeightMeans
from torchbagua.runtime.weight_runner import WeightImpl, WeightRunner

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "BaguaBucket",
    "BaguaTensor",
    "BucketState",
    "ErrorFeedback",
    "GradientRunner",
    "Job",
    "Lane",
    "Lockstep",
    "ParameterState",
    "Runner",
    "Topology",
    "WeightBucket",
    "WeightBuckets",
    "WeightImpl",
    "WeightMeans",
    "WeightRunner",
    "mean",
    "register",
    "residual_state",
]
