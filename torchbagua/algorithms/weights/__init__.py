"""Algorithms that average weights after the optimizer's step, in every step or in rounds.

May import what algorithms may.
Begin with averaging.py, then decentralized.py, asynchronous.py and diloco.py.
"""
