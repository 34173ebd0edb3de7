"""Algorithms that average gradients, bucket by bucket, during backward.

May import whatever torchbagua.algorithms may import.
Begin with all_reduce.py, then compressed_all_reduce.py, which bytegrad.py and topk.py build on.
"""
