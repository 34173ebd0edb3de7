"""QAdam: an algorithm and the optimizer that belongs to it.

May import what algorithms may.
Begin with algorithm.py; optimizer.py has the update.
"""
