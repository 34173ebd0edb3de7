"""torch.compile: compiled modules train bitwise equal to modules that are not, in every way and mode but one."""

from pathlib import Path

import pytest

import warm_python

PAIRS = [
    "inner:True",
    "ddp.compile:True",
    "compile(ddp):True",
    "compile(ddp):False",
    "inner:python_reducer_without_compiled_forward",
    "ddp.compile:python_reducer_without_compiled_forward",
]


@pytest.mark.slow
def test_compiled_module_is_trained_as_without_compilation() -> None:
    """Run in real processes: torch.compile does not support threads that compile the same code at once."""
    script = Path(__file__).with_name("compiled_rank.py")
    printed = warm_python.run_ranks(script, *PAIRS, timeout_s=300).stdout
    digests = [line.split()[1:] for line in printed.splitlines() if line.startswith("digests")]
    assert len(digests) == 2 * 2 * len(PAIRS)  # ranks, algorithms
    for name, pair, plain, compiled in digests:
        assert plain == compiled, f"{name}, {pair}"
    assert len({plain for name, _, plain, _ in digests if name == "decentralized"}) == 2, "each rank its own"
