"""CPU rehearsal: Megatron's real training loop on a CPU, for any world size that fits.

Explicit, apart from everything else, and undone when it ends. It changes where tensors live, leaves
out what only a GPU has, and gives products of bf16 tensors one meaning on every CPU; it changes no
other arithmetic that Megatron would do on a CPU tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_fsdp_v2_mcore.rehearsal.flags import (
    FLAG,
    TRANSFORMER_ENGINE,
    VERBOSE_FLAG,
    RehearsalError,
    cpu_capability,
    cpu_environment,
    is_requested,
    transformer_impl,
    with_cpu_defaults,
    with_cpu_flags,
)

__all__ = ["FLAG", "VERBOSE_FLAG", "RehearsalError", "check_device", "is_requested", "rehearse"]


def check_device(argv: Sequence[str]) -> None:
    """Refuse to start where device and command line do not fit.

    Raises:
        RehearsalError: CUDA is there and a rehearsal is asked for, or neither is.
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
    argv: Sequence[str], *, verbose: bool = False, into_parser: bool = False
) -> Iterator[list[str]]:
    """Make Megatron run on the CPU for as long as the context lasts.

    Enter it before anything imports Megatron. `megatron.training` need not be installed. The flags
    decide whether Megatron finds Transformer Engine, which is for the whole process.

    Args:
        argv: The user's flags.
        verbose: Print everything Megatron prints.
        into_parser: Whether what a CPU needs becomes defaults of Megatron's parser, which then
            checks the flags as well, instead of flags. A script's own parser would not know them.

    Yields:
        The flags to give to Megatron, or to the script.

    Raises:
        RehearsalError: A flag cannot be supported on a CPU.
    """
    from megatron_fsdp_v2_mcore.patching import Patches
    from megatron_fsdp_v2_mcore.rehearsal.bf16_products import rounded_once
    from megatron_fsdp_v2_mcore.rehearsal.cuda_stubs import stand_in
    from megatron_fsdp_v2_mcore.rehearsal.devices import CpuDevices
    from megatron_fsdp_v2_mcore.rehearsal.output import quiet
    from megatron_fsdp_v2_mcore.rehearsal.patches import (
        PATCHES,
        WITHOUT_TRANSFORMER_ENGINE,
        parser_patch,
    )
    from megatron_fsdp_v2_mcore.rehearsal.te import load

    flags = [word for word in argv if word not in (FLAG, VERBOSE_FLAG)]
    if not into_parser:
        flags = with_cpu_flags(flags)
    with_te = transformer_impl(flags) == TRANSFORMER_ENGINE
    patches = Patches()
    num_threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        stack.callback(patches.undo)
        torch.set_num_threads(1)
        patches.default_environment(cpu_environment(flags))
        # Compiled helpers of Megatron run as written: compiling for a CPU takes longer than a run,
        # and may round differently.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(rounded_once())
        stack.enter_context(CpuDevices())
        stand_in(patches, cpu_capability(flags))
        # Before anything imports Megatron, as the next line does.
        stack.enter_context(load.loaded() if with_te else load.kept_out())
        if not verbose:
            stack.enter_context(quiet(patches))
        for patch in (*PATCHES, *(() if with_te else WITHOUT_TRANSFORMER_ENGINE)):
            patches.apply(patch)
        if into_parser:
            patches.apply(parser_patch(with_cpu_defaults(flags)))
        yield flags
