"""Sharded modules (FSDP2): how an attachment communicates their gradients, replicas and weights.

May import what training may; of training itself nothing outside of this package.
Begin with communication.py, which says what is put in place, then reduce_scatter.py and rows.py.
"""
