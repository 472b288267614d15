"""Whether Megatron and this package accept flags."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from megatron_fsdp_v2.plan.sources import FlagsError
from megatron_fsdp_v2_mcore.plan.source import parse_flags
from megatron_fsdp_v2_patching import environment


def rejection(words: Sequence[str], typed: Sequence[str], num_ranks: int) -> str:
    """Return the reason why Megatron or this package rejects flags; empty if neither does.

    Args:
        words: Flags that Megatron validates.
        typed: The user's flags, which this package checks.
        num_ranks: Number of ranks of the job.
    """
    from megatron_fsdp_v2_mcore import install, uninstall

    install()
    try:
        return reason_of(lambda: parse_flags(words, typed), num_ranks)
    finally:
        uninstall()


def reason_of(check: Callable[[], object], num_ranks: int) -> str:
    """Return the reason why a check rejects flags, on the first rank of a job; empty if it passes.

    Args:
        check: Raises `FlagsError`.
        num_ranks: Number of ranks of the job.
    """
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    first_rank = {"WORLD_SIZE": str(num_ranks), "RANK": "0", "LOCAL_RANK": "0"}
    try:
        with environment(first_rank), redirect_stdout(io.StringIO()):
            check()
    except FlagsError as error:
        return str(error)
    finally:
        destroy_num_microbatches_calculator()
    return ""
