"""What attached algorithms communicate for a module that fully_shard has sharded: gradients, replicas, weights.

May import what training may; of training itself nothing outside of this package.
Begin with communication.py, which says what is put in place, then reduce_scatter.py and rows.py.
"""
