"""What carries bytes between ranks: private groups, gloo's and NCCL's ways, streams, and their errors.

May import observe and the modules that begin with _.
Begin with private_groups.py and communicator.py.
"""
