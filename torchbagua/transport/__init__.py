"""Sending bytes between ranks: private groups, connections over gloo and NCCL, streams, and the error of all of them.

May import observe and the modules that begin with _.
Begin with private_groups.py and communicator.py.
"""
