"""For authors of algorithms, codecs and transports: simulated training, and tests of their own classes. Experimental.

May import everything but the command line; nothing imports it.
Begin with simulation/run.py, and transports/run.py.
"""

from torchbagua.testing.transports import TransportFault, check_member, check_transport

__all__ = ["TransportFault", "check_member", "check_transport"]
