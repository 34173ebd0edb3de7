"""Algorithms that average gradients, bucket by bucket, during backward.

May import what algorithms may.
Begin with all_reduce.py, then compressed_all_reduce.py, which bytegrad.py and topk.py build on.
"""
