"""Sharded modules (FSDP2): how an attachment communicates their gradients, replicas and weights.

May import what `training` may, but nothing of `training` outside of this package.
Begin with communication.py, which lists everything that is installed, then comm_runner.py.
"""
