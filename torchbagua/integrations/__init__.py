"""Adapters: `attach` in the training loops of other frameworks, and each rank's state in their checkpoints.

May import the packages below it. They use the public API where it has what they need.
Begin with common.py, then the framework's own file.
"""
