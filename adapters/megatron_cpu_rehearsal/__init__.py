"""Megatron and Transformer Engine on a CPU, for any number of ranks that fits on one machine.

`rehearse` is a context manager. It maps CUDA devices to the CPU, replaces `torch.cuda` by stubs and
patches the few places of Megatron that need a GPU; it is undone when the context ends. Tensors live
elsewhere, and products of bf16 tensors have one definition on every CPU; all other arithmetic is
what Megatron does on a CPU tensor.
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
    """Raise an error where the device and the command line do not fit.

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

    Enter it before anything imports Megatron. `megatron.training` need not be installed. The flags
    decide whether Megatron finds Transformer Engine, once for the process.

    Args:
        argv: The user's flags, in Megatron's spelling.
        verbose: Print everything that Megatron prints.
        into_parser: Make the flags that a CPU needs defaults of Megatron's parser, which then
            checks the user's flags as well, instead of adding them to the command line, where a
            script with a parser of its own would not know them.
        supported: Names of flags that need a GPU in Megatron and that the caller supports on a CPU.

    Yields:
        The flags to give to Megatron, or to the script.

    Raises:
        RehearsalError: A flag cannot be supported on a CPU.
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
    from megatron_cpu_rehearsal.patching import Patches
    from megatron_cpu_rehearsal.te import load

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
        # Megatron's compiled helpers run as written: compiling them for a CPU takes longer than a
        # run, and may round differently.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(rounded_once())
        stack.enter_context(CpuDevices())
        install_stubs(patches, cpu_capability(flags))
        # Before anything imports Megatron, as the next line does.
        stack.enter_context(load.loaded() if with_te else load.kept_out())
        if not verbose:
            stack.enter_context(quiet(patches))
        for patch in (*PATCHES, *(() if with_te else WITHOUT_TRANSFORMER_ENGINE)):
            patches.apply(patch)
        if into_parser:
            patches.apply(PARSER, flags, supported)
        yield flags
