"""A step causes no page faults of our own: what is needed in each is kept from one to the next."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

import programs

# Whatever takes so much is memory that the system gives anew each time, and takes back; the rest is none of that.
_MAPPED_BYTES = 1 << 19


@pytest.mark.slow
def test_no_algorithm_takes_new_memory_in_a_step() -> None:
    """Autograd does, for the gradients that it adds to those of the buckets."""
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    program = Path(__file__).with_name("page_faults_program.py")
    printed = json.loads(programs.run([sys.executable, str(program)], env={**os.environ, **thresholds}).stdout)
    page = resource.getpagesize()
    # Half of what one allocation of ours would add, since every rank makes it; a few pages are the interpreter's.
    most = (printed["gradient_bytes"] + printed["num_ranks"] * _MAPPED_BYTES / 2) / page
    assert len(printed["page_faults"]) == 10
    above = {name: number for name, number in printed["page_faults"].items() if number >= most}
    assert not above, (most, above)
