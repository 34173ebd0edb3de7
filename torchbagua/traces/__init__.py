"""Observers of communication. They know `torchbagua.events` and nothing else of the package."""

from torchbagua.traces.recorder import Recorder
from torchbagua.traces.summary import Summary

__all__ = ["Recorder", "Summary"]
