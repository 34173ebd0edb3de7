"""Adapters: `attach` in other people's training loops, and each rank's state in their checkpoints.

May import whatever users may.
Begin with common.py, then the framework's own file.
"""
