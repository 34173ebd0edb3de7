"""torchbagua: communication-efficient data-parallel training in plain PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from torchbagua import algorithms, observe
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms import *  # noqa: F403
from torchbagua.collectives import topology
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import Topology
from torchbagua.observe.events import CommEvent, Observer
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.weight_buckets import WeightBuckets
from torchbagua.training.attach import Attachment, attach
from torchbagua.training.ddp import comm_hook
from torchbagua.transport.errors import CommunicationError
from torchbagua.version import __version__

if TYPE_CHECKING:
    from torchbagua import fsdp

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


def __getattr__(name: str) -> Any:
    if name == "fsdp":  # only trainings with fully_shard need it
        return importlib.import_module("torchbagua.fsdp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
