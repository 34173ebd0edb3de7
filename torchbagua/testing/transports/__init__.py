"""The public test suite of transports: it checks the contract of `Transport`, and the abilities that a class claims.

May import transport and the packages below it.
Read run.py first, then messages.py, collectives.py and failures.py, which contain the checks.
"""

from torchbagua.testing.transports.member import TransportFault
from torchbagua.testing.transports.run import check_member, check_transport

__all__ = ["TransportFault", "check_member", "check_transport"]
