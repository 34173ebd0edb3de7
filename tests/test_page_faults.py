"""torchbagua causes no page faults in a step: its memory is reused from step to step."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

import programs

# The system maps, and unmaps, every allocation of at least this many bytes; smaller allocations reuse memory.
_MAPPED_BYTES = 1 << 19


@pytest.mark.slow
def test_no_algorithm_takes_new_memory_in_a_step() -> None:
    """Autograd does, for the gradients that it adds to the buckets' gradients."""
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    program = Path(__file__).with_name("page_faults_program.py")
    printed = json.loads(programs.run([sys.executable, str(program)], env={**os.environ, **thresholds}).stdout)
    page = resource.getpagesize()
    # Half of the pages that an allocation of ours on every rank would add; a few pages are the interpreter's.
    most = (printed["gradient_bytes"] + printed["num_ranks"] * _MAPPED_BYTES / 2) / page
    assert len(printed["page_faults"]) == 10
    above = {name: number for name, number in printed["page_faults"].items() if number >= most}
    assert not above, (most, above)
