"""torchbagua: communication-efficient data-parallel training in plain PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from torchbagua import algorithms, codecs, extend, observe
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms import *  # noqa: F403
from torchbagua.collectives import topology
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.training.attach import Attachment, attach
from torchbagua.training.ddp import comm_hook
from torchbagua.transport.errors import CommunicationError
from torchbagua.version import __version__

if TYPE_CHECKING:
    from torchbagua import fsdp

__all__ = [
    "Attachment",
    "BaguaProcessGroup",
    "CommunicationError",
    "UncompressedParametersWarning",
    "__version__",
    "attach",
    "codecs",
    "comm_hook",
    "extend",
    "fsdp",
    "observe",
    "topology",
]
__all__ += algorithms.__all__


def __getattr__(name: str) -> Any:
    if name == "fsdp":  # only trainings with fully_shard need it
        return importlib.import_module("torchbagua.fsdp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
