"""What every algorithm runs on: buckets, their operations, the lane that runs them, and what is kept of parameters.

May import collectives and what is below them.
Begin with bucket.py, then operations.py and lane.py; weights are in weight_buckets.py, residuals in parameter_state.py.
"""
