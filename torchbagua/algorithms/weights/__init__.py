"""Algorithms that average weights after the optimizer's step, at every step or in rounds.

May import whatever torchbagua.algorithms may import.
Begin with rounds.py, then decentralized.py, asynchronous.py and diloco.py.
"""
