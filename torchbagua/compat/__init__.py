"""The APIs of two other projects, Bagua and mlbench, on top of this package's public API.

May import only the public API, as tests/test_sources.py checks; nothing imports it.
Begin with bagua/data_parallel/bagua_distributed.py, or mlbench/base.py.
"""
