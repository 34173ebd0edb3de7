"""torchbagua: communication-efficient data-parallel training in plain PyTorch."""

from torchbagua import algorithms, fsdp, observe
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms import *  # noqa: F403
from torchbagua.collectives import topology
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import CommEvent, Observer
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.weight_buckets import WeightBuckets
from torchbagua.training.attach import attach
from torchbagua.training.attachment import Attachment
from torchbagua.training.comm_hook import comm_hook
from torchbagua.transport.errors import CommunicationError
from torchbagua.version import __version__

__all__ = [
    "Attachment",
    "BaguaBucket",
    "BaguaProcessGroup",
    "BaguaTensor",
    "CommEvent",
    "CommunicationError",
    "Observer",
    "Topology",
    "UncompressedParametersWarning",
    "WeightBuckets",
    "__version__",
    "attach",
    "comm_hook",
    "fsdp",
    "observe",
    "topology",
]
__all__ += algorithms.__all__
