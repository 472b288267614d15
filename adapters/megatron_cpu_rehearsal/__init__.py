"""Megatron and Transformer Engine on a CPU, for any number of ranks that fits on one machine.

`rehearse` is a context manager. It maps CUDA devices to the CPU, replaces `torch.cuda` by stubs and
patches the few functions of Megatron that need a GPU; the end of the context reverts these changes.
Products of bf16 tensors have the same definition on every CPU; all other arithmetic is Megatron's
own, on CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from megatron_cpu_rehearsal.errors import FlagError, RehearsalError
from megatron_cpu_rehearsal.flags import (
    FLAG,
    TRANSFORMER_ENGINE,
    VERBOSE_FLAG,
    cpu_capability,
    cpu_environment,
    is_requested,
    transformer_impl,
    with_cpu_flags,
)

__all__ = [
    "FLAG",
    "VERBOSE_FLAG",
    "FlagError",
    "RehearsalError",
    "check_device",
    "is_requested",
    "rehearse",
]


def check_device(argv: Sequence[str]) -> None:
    """Raise an error if the command line does not match the available device.

    Args:
        argv: The user's flags.

    Raises:
        RehearsalError: CUDA is available and `--cpu-rehearsal` is given, or neither is.
    """
    if is_requested(argv):
        if torch.cuda.is_available():
            raise RehearsalError(
                f"{FLAG} never runs where CUDA is in use; leave it out, or hide the GPUs with "
                "CUDA_VISIBLE_DEVICES="
            )
    elif not torch.cuda.is_available():
        raise RehearsalError(
            f"No GPU was found. Add {FLAG} to run the same training on this machine's CPU."
        )


@contextlib.contextmanager
def rehearse(
    argv: Sequence[str] = (),
    *,
    verbose: bool = False,
    into_parser: bool = False,
    supported: Collection[str] = (),
) -> Iterator[list[str]]:
    """Run Megatron on the CPU inside this context.

    Enter the context before the first import of Megatron. `megatron.training` need not be
    installed. The flags at this import determine whether Megatron uses Transformer Engine for the
    rest of the process.

    Args:
        argv: The user's flags, in Megatron's spelling.
        verbose: Print everything that Megatron prints.
        into_parser: Set the flags that a CPU needs as defaults of Megatron's parser, which then
            also checks the user's flags. Otherwise these flags are added to the command line,
            which a script with its own parser may not accept.
        supported: Names of flags that need a GPU in Megatron and that the caller supports on a CPU.

    Yields:
        The flags to pass to Megatron, or to the script.

    Raises:
        RehearsalError: A flag is not supported on a CPU.
    """
    from megatron_cpu_rehearsal.bf16_products import rounded_once
    from megatron_cpu_rehearsal.cuda_stubs import install_stubs
    from megatron_cpu_rehearsal.devices import CpuDevices
    from megatron_cpu_rehearsal.output import quiet
    from megatron_cpu_rehearsal.patches import (
        PARSER,
        PATCHES,
        WITHOUT_TRANSFORMER_ENGINE,
    )
    from megatron_cpu_rehearsal.te import load
    from megatron_fsdp_v2_patching import Patches

    flags = [word for word in argv if word not in (FLAG, VERBOSE_FLAG)]
    if not into_parser:
        flags = with_cpu_flags(flags, supported)
    with_te = transformer_impl(flags) == TRANSFORMER_ENGINE
    patches = Patches()
    num_threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        stack.callback(patches.undo)
        torch.set_num_threads(1)
        patches.default_environment(cpu_environment(flags))
        # Disable compilation of Megatron's helpers: for a CPU it takes longer than a run and may
        # change rounding.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(rounded_once())
        stack.enter_context(CpuDevices())
        install_stubs(patches, cpu_capability(flags))
        # This must precede the import of Megatron in the next line.
        stack.enter_context(load.loaded() if with_te else load.kept_out())
        if not verbose:
            stack.enter_context(quiet(patches))
        for patch in (*PATCHES, *(() if with_te else WITHOUT_TRANSFORMER_ENGINE)):
            patches.apply(patch)
        if into_parser:
            patches.apply(PARSER, flags, supported)
        yield flags
