"""For authors of algorithms, codecs and transports: simulated training, and tests of their own classes. Experimental.

May import everything but the command line; nothing imports it.
Begin with simulation/run.py, transports/run.py, codecs.py and algorithms.py.
"""

from torchbagua.testing.algorithms import AlgorithmFault, check_algorithm
from torchbagua.testing.codecs import CodecFault, check_codec
from torchbagua.testing.transports import TransportFault, check_member, check_transport

__all__ = [
    "AlgorithmFault",
    "CodecFault",
    "TransportFault",
    "check_algorithm",
    "check_codec",
    "check_member",
    "check_transport",
]
