"""The training loop: `attach` and its checks, DDP, optimizers, GradScaler, and the end of a step.

May import `algorithms` and the layers below it. The layers below do not depend on a training loop.
Begin with attach.py, whose docstring gives the execution order, then ddp.py and steps.py.
"""
