"""Other projects' APIs on top of this package's public one: Bagua's and mlbench's.

May import whatever users may; nothing imports it.
Begin with bagua/data_parallel/bagua_distributed.py, or mlbench/base.py.
"""
