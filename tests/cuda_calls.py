"""Count the CUDA functions that a part of a program calls, on all its threads, with torch's profiler."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

# Calls in which the host waits for the GPU. cudaMemcpyAsync does not wait if the host's memory is pinned.
WAITING_CALLS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}


Events = list[dict[str, Any]]


def events_of(profile: torch.profiler.profile, folder: Path) -> Events:
    """Return the events of a profile that has ended. torch writes its trace, into `folder`, only once."""
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events: Events = json.loads(path.read_text())["traceEvents"]
    return events


def calls_within(events: Events, name: str) -> Counter[str]:
    """Count the calls during the `torch.profiler.record_function(name)` of a profile's events."""
    spans = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == name]
    assert len(spans) == 1, f"{len(spans)} annotations {name!r}"
    begin, end = spans[0]["ts"], spans[0]["ts"] + spans[0]["dur"]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return Counter(call["name"] for call in calls if begin <= call["ts"] <= end)


def waiting(calls: Counter[str]) -> dict[str, int]:
    """Return the calls in which the host waits."""
    return {name: count for name, count in calls.items() if name in WAITING_CALLS}
