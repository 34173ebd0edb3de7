"""Adapters: `attach` in the training loops of other frameworks, and each rank's state in their checkpoints.

May import only what users may.
Begin with common.py, then the framework's own file.
"""
