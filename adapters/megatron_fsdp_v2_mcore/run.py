"""Run a pretraining script of your own with this package installed into Megatron.

`python -m megatron_fsdp_v2_mcore.run path/to/script.py <its flags>`, under torchrun.
"""

from __future__ import annotations

from functools import partial

from megatron_cpu_rehearsal.__main__ import run_script
from megatron_fsdp_v2_mcore.launch import launch


def main() -> None:
    """Run the script named first on the command line as `__main__`, with the flags after it.

    Raises:
        SystemExit: No script is named, or it does not exist.
    """
    run_script("megatron_fsdp_v2_mcore.run", partial(launch, own_parser=True))


if __name__ == "__main__":
    main()
