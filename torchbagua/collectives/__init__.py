"""Means, exchanges and agreements among the ranks of a group, compressed or in full precision.

May import transport, codecs and the packages below them. Only these two packages call collectives of torch.distributed.
Begin with process_group.py, then mean.py.
"""

from torchbagua.collectives.agreement import agree as agree
from torchbagua.collectives.agreement import all_reduce_max as all_reduce_max
from torchbagua.collectives.broadcast import broadcast_tensors as broadcast_tensors
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import AllRanks, Graph, Ring, ShiftOne, Topology
from torchbagua.transport.errors import CommunicationError

__all__ = ["AllRanks", "BaguaProcessGroup", "CommunicationError", "Graph", "Ring", "ShiftOne", "Topology"]
