"""Sharded modules (FSDP2): how an attachment communicates their gradients, replicas and weights.

May import what training may; of training itself nothing outside of this package.
Begin with communication.py, which says what is installed, then reduce_scatter.py and comm_runner.py.
"""
