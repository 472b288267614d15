"""Run a training script on the CPU: `python -m megatron_cpu_rehearsal path/to/script.py <flags>`.

For several ranks: `torchrun --nproc-per-node 2 -m megatron_cpu_rehearsal path/to/script.py`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_cpu_rehearsal import FLAG, VERBOSE_FLAG, RehearsalError, check_device, rehearse

__all__ = ["main", "run_script"]


def run_script(
    program: str, setup: Callable[[Sequence[str]], AbstractContextManager[Sequence[str]]]
) -> None:
    """Run the first command-line argument as the script `__main__`.

    Args:
        program: Name of the running module, for the usage message.
        setup: Takes the flags after the script and returns the context in which the script runs.
            The context yields the flags to pass to the script.

    Raises:
        SystemExit: No script is given, or the script does not exist.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python -m {program} path/to/script.py [flags]")
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"There is no script {script}; name your pretraining script first.")
    with setup(sys.argv[2:]) as argv:
        sys.argv = [str(script), *argv]
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    """Run a script with the flags that a CPU needs as defaults of Megatron's parser.

    Raises:
        SystemExit: With code 2 after a one-line message on standard error, if CUDA is available or
            a flag is not supported on a CPU.
    """
    try:
        check_device([FLAG])
        run_script(
            "megatron_cpu_rehearsal",
            lambda argv: rehearse(argv, verbose=VERBOSE_FLAG in argv, into_parser=True),
        )
    except RehearsalError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
