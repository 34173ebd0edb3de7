"""Ranks as threads of which one runs at a time, in a simulated network and virtual time; a seed determines all events.

May import all packages but cli; nothing imports it. Everything above the transport is the code that runs in training.
Begin with run.py, then scheduler.py. network.py has the transport, and ddp.py calls the hook as DDP does.
"""
