"""Other projects' APIs on top of this package's public one: Bagua's and mlbench's.

May import what users may, which tests/test_compat_surface.py checks; nothing imports it.
Begin with bagua/data_parallel/bagua_distributed.py, or mlbench/base.py.
"""
