"""Algorithms that average gradients, bucket by bucket, during backward.

May import what algorithms may.
Begin with all_reduce.py, then compressed_all_reduce.py, of which bytegrad.py and topk.py are made.
"""
