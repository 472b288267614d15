"""Run a user's pretraining script with this package installed into Megatron.

Usage, under torchrun: `python -m megatron_fsdp_v2_mcore.run path/to/script.py <its flags>`.
"""

from __future__ import annotations

from functools import partial

from megatron_cpu_rehearsal.__main__ import run_script
from megatron_fsdp_v2_mcore.launch import launch


def main() -> None:
    """Run the script that the first argument names as `__main__`, with the remaining arguments.

    Raises:
        SystemExit: No script is given, or the script does not exist.
    """
    run_script("megatron_fsdp_v2_mcore.run", partial(launch, own_parser=True))


if __name__ == "__main__":
    main()
