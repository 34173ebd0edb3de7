"""Every tutorial runs by the command in its docstring, and shows what it claims."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def check_ddp_to_bytegrad(output: str) -> None:
    first_losses = [float(loss) for loss in re.findall(r"step   0: loss (\S+)", output)]
    last_losses = [float(loss) for loss in re.findall(r"^(?:plain DDP|ByteGrad): +loss (\S+),", output, re.MULTILINE)]
    megabytes = [float(size) for size in re.findall(r"(\S+) MB sent", output)]

    # ln 256 = 5.55 nats is what guessing all bytes equally gives; 3.2 is the entropy of single bytes of source code.
    assert first_losses == [pytest.approx(5.5, abs=0.4)] * 2
    assert len(last_losses) == 2
    assert max(last_losses) < 2
    assert last_losses[1] == pytest.approx(last_losses[0], rel=0.01), "ByteGrad promises plain DDP's loss within 1 %"
    # 8 bits for 32, and 8 bytes of range for each block.
    assert 3.9 < megabytes[0] / megabytes[1] < 4


CHECKS = {"01_ddp_to_bytegrad": check_ddp_to_bytegrad}


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(tutorial: Path) -> None:
    docstring = ast.get_docstring(ast.parse(tutorial.read_text(encoding="utf-8"))) or ""
    (command,) = re.findall(r"^ +torchrun (.*)$", docstring, re.MULTILINE)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]

    run = subprocess.run(
        torchrun + shlex.split(command), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )

    assert run.returncode == 0, run.stderr
    CHECKS[tutorial.stem](run.stdout)


def test_every_check_has_its_tutorial() -> None:
    assert sorted(CHECKS) == [tutorial.stem for tutorial in TUTORIALS]
