"""The public test suite of transports: whether one keeps the promises of `Transport`, and has the abilities it claims.

May import observe and the modules that begin with _.
Begin with run.py, then messages.py, collectives.py and failures.py, which hold the checks.
"""

from torchbagua.transport.suite.member import TransportFault
from torchbagua.transport.suite.run import check_member, check_transport

__all__ = ["TransportFault", "check_member", "check_transport"]
