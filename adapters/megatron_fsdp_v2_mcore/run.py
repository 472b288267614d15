"""Run a pretraining script of your own with this package installed into Megatron.

`python -m megatron_fsdp_v2_mcore.run path/to/script.py <its flags>`, under torchrun.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_fsdp_v2_mcore.launch import launch


def main() -> None:
    """Run the script named first on the command line as `__main__`, with the flags after it.

    Raises:
        SystemExit: No script is named, or there is no such file.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m megatron_fsdp_v2_mcore.run path/to/script.py [flags]")
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"There is no script {script}; name your pretraining script first.")
    with launch(sys.argv[2:], own_parser=True) as argv:
        sys.argv = [str(script), *argv]
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
