"""The training loop: `attach` and its checks, DDP, optimizers, GradScaler, and the end of a step.

May import algorithms and what is below them. Nothing below knows a training loop.
Begin with attach.py, whose docstring has the whole order, then attachment.py; `fsdp2` is for FSDP2's modules.
"""
