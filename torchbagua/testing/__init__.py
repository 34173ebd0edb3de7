"""For authors of algorithms, codecs and transports: simulated training, and tests of their own classes. Experimental.

May import everything but the command line; nothing imports it.
Begin with simulation/run.py, transports/run.py and codecs.py.
"""

from torchbagua.testing.codecs import CodecFault, check_codec
from torchbagua.testing.transports import TransportFault, check_member, check_transport

__all__ = ["CodecFault", "TransportFault", "check_codec", "check_member", "check_transport"]
