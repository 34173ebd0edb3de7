"""The runtime of every algorithm: the Runner, buckets and their operations, the lane, and state by parameter.

May import collectives and what is below them.
Begin with impl.py and runner.py, then bucket.py and lane.py; weights are in weight_buckets.py.
"""
