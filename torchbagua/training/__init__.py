"""What knows a training loop: `attach`, DDP, optimizers, GradScaler, and when a step ends.

May import algorithms and what is below them. Nothing below knows a training loop.
Begin with attach.py, whose docstring has the whole order, then attachment.py; `sharded` is for FSDP2's modules.
"""
