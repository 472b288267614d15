"""Training flags, parsed and validated by Megatron for a number of ranks that are not there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_cpu_rehearsal import FLAG, VERBOSE_FLAG
from megatron_cpu_rehearsal.flags import CPU_FLAGS, GPU_FLAGS, IMPL_FLAG
from megatron_fsdp_v2.plan.sources import FlagsError
from megatron_fsdp_v2_mcore.flags.arguments import API_FLAG, check_before, is_enabled
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of, rejections_as_flag_errors
from megatron_fsdp_v2_mcore.flags.precision import DTYPES

__all__ = ["parsed", "rejections_as_errors", "without_gpu_flags"]


@contextlib.contextmanager
def rejections_as_errors() -> Iterator[None]:
    """Say that Megatron rejects the flags where it raises, in its own words.

    Raises:
        FlagsError: It did.
    """
    try:
        with rejections_as_flag_errors("Megatron rejects these flags"):
            yield
    except FlagError as error:
        raise FlagsError(str(error)) from None


def without_gpu_flags(argv: Sequence[str]) -> list[str]:
    """A command line without what only a GPU can support and memory does not depend on.

    Flags that choose kernels are left to the rehearsal, which chooses those of a CPU.

    Args:
        argv: The user's flags.
    """
    values = {flag.name: flag.values for flag in GPU_FLAGS}
    values |= {flag.name: () for flag in CPU_FLAGS}
    # A plan is made of Megatron's own layers, whose parameters are the same.
    values[IMPL_FLAG] = ()
    # Of Transformer Engine's Adam; a plan reads them as the user gave them.
    values |= {flag_of(name): () for name in DTYPES}
    # Megatron rejects it without --fp4-format, which is Transformer Engine's.
    values["--fp4-param-gather"] = ()
    # Megatron rejects it without --use-nccl-ub, which only a GPU can support.
    values["--fsdp-manual-registration"] = ()
    kept: list[str] = []
    words = [word for word in argv if word not in (FLAG, VERBOSE_FLAG)]
    position = 0
    while position < len(words):
        name, joined, value = words[position].partition("=")
        end = position + 1
        while not joined and end < len(words) and not words[end].startswith("--"):
            end += 1
        value = value if joined else " ".join(words[position + 1 : end])
        if name not in values or (values[name] and value not in values[name]):
            kept += words[position:end]
        position = end
    return kept


def parsed(argv: Sequence[str], asked: Sequence[str]) -> tuple[Any, Any]:
    """Megatron's arguments for a CPU, validated, and as the user asked for them, only parsed.

    The package has to be installed into Megatron.

    Args:
        argv: Flags that a CPU can support.
        asked: The user's own flags, which are checked for what this package rejects.

    Raises:
        FlagsError: Megatron or this package rejects them, in their own words.
        SystemExit: Megatron's parser does not know a flag; it has said so, with code 2.
    """
    from megatron.training import arguments

    before = sys.argv
    try:
        with rejections_as_errors():
            sys.argv = ["plan", *(word for word in asked if word not in (FLAG, VERBOSE_FLAG))]
            as_asked = arguments.parse_args()
            if not (is_enabled(as_asked) and as_asked.use_megatron_fsdp):
                raise FlagsError(
                    f"these flags train without this package; add --use-megatron-fsdp {API_FLAG}"
                )
            # Whether there is a checkpoint to load plays no part in a plan.
            as_asked.load = None
            check_before(as_asked)
            sys.argv = ["plan", *argv]
            args = arguments.parse_args()
            args.load = None
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    finally:
        sys.argv = before
    return args, as_asked
