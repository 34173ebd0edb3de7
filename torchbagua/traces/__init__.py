"""Observers of communication. They know `torchbagua.events` and nothing else of the package."""

from torchbagua.traces.recorder import Recorder

__all__ = ["Recorder"]
