"""Running the adapter as a user does: torchrun in a subprocess, and its iteration lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Run:
    """A finished command.

    Attributes:
        code: Exit code.
        output: Standard output and error together.
    """

    code: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """Printed loss by iteration."""
        return {int(i): float(loss) for i, loss in _LOSS.findall(self.output)}

    @property
    def lines_before_training(self) -> list[str]:
        """Lines before the first iteration line, torchrun's own left out."""
        lines = []
        for line in self.output.splitlines():
            if _LOSS.search(line):
                break
            if line.strip() and "OMP_NUM_THREADS" not in line and set(line) != {"*"}:
                lines.append(line)
        return lines


def run_module(module: str, arguments: Sequence[str], **environment: str) -> Run:
    """Run `python -m module` in one process, without torchrun."""
    return _run([sys.executable, "-m", module, *arguments], environment)


def torchrun(num_ranks: int, module: str, flags: Sequence[str], **environment: str) -> Run:
    """Run `torchrun -m module` on this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return _run([sys.executable, *launcher, "-m", module, *flags], environment)


def _run(command: list[str], environment: dict[str, str]) -> Run:
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment},
    )
    return Run(done.returncode, done.stdout)
