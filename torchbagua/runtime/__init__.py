"""The runtime of every algorithm: the Runner, buckets and their operations, the lane, and per-parameter state.

May import collectives and the packages below them.
Begin with runner.py, gradient_runner.py and weight_runner.py, then bucket.py and lane.py.
"""
