"""Sharded modules (FSDP2): how an attachment communicates their gradients, replicas and weights.

May import what `training` may, but of `training` outside of this package only ddp.ModuleHook.
Begin with communication.py, which lists everything that is installed, then reduce_scatters.py.
"""
