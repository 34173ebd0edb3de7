"""Send tensors between ranks: transports, their abilities, their choice by a group's backends, and communicators.

May import observe and the modules whose names begin with _.
Begin with base.py, then gloo.py. communicator.py defines the operations, and selects the transport.
"""

from torchbagua.transport.base import (
    Abilities,
    LacksAbility,
    Members,
    MissingOperation,
    Transport,
    TransportError,
    TransportMaker,
)

__all__ = [
    "Abilities",
    "LacksAbility",
    "Members",
    "MissingOperation",
    "Transport",
    "TransportError",
    "TransportMaker",
]
