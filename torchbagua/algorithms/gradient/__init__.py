"""Algorithms that average gradients, bucket by bucket, during backward.

May import whatever torchbagua.algorithms may import.
Begin with all_reduce.py, then compressed.py, which topk.py builds on.
"""
