"""The public test suite of transports: it checks the contract of `Transport`, and the abilities that a class claims.

May import observe and the modules whose names begin with _.
Read run.py first, then messages.py, collectives.py and failures.py, which contain the checks.
"""

from torchbagua.transport.suite.member import TransportFault
from torchbagua.transport.suite.run import check_member, check_transport

__all__ = ["TransportFault", "check_member", "check_transport"]
