"""torch.compile: compiled modules train bitwise equal to modules that are not, in every way and mode but one."""

from pathlib import Path

import pytest

import programs

WAYS = ["inner", "ddp.compile", "compile(ddp)"]
MODES = ["True", "False", "python_reducer_without_compiled_forward"]


@pytest.mark.slow
def test_compiled_module_is_trained_as_without_compilation() -> None:
    """Run in real processes: torch.compile does not support threads that compile the same code at once."""
    script = Path(__file__).with_name("compiled_rank.py")
    run = programs.run(programs.torchrun(script, "--ways", *WAYS, "--modes", *MODES), timeout_s=300)
    digests = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("digests")]
    assert len(digests) == 2 * 2 * len(WAYS) * len(MODES)  # ranks, algorithms
    for name, mode, way, plain, compiled in digests:
        assert plain == compiled, f"{name}, optimize_ddp={mode}, {way}"
    assert len({plain for name, _, _, plain, _ in digests if name == "decentralized"}) == 2, "each rank its own"
