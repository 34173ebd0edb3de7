"""QAdam: a gradient algorithm and its optimizer.

May import whatever torchbagua.algorithms may import.
Begin with algorithm.py; optimizer.py implements the update.
"""
