"""Moving tensors between ranks: transports and their abilities, chosen by the backends of a group, and communicators.

May import observe and the modules that begin with _.
Begin with base.py, then gloo.py; communicator.py names what moves, and choice.py says over which transport.
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
