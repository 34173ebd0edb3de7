"""The runtime of every algorithm: buckets, their operations, the lane that runs them, and state by parameter.

May import collectives and what is below them.
Begin with bucket.py, then operations.py and lane.py; weights are in weight_buckets.py, residuals in parameter_state.py.
"""
