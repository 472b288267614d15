"""Plans of Megatron's flags: the source of `megatron-fsdp-v2 plan -- <flags>`.

Megatron parses and validates the flags for the whole number of ranks. `model.py` builds the model
on the meta device as one rank of each pipeline stage does, and describes it with the code that
shards it in a training. This file must be imported before the rehearsal starts, Megatron after.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megatron_cpu_rehearsal import FLAG, VERBOSE_FLAG, rehearse
from megatron_cpu_rehearsal.flags import CPU_FLAGS, GPU_FLAGS, IMPL_FLAG, LOCAL
from megatron_fsdp_v2.plan.sources import FlagsError, SourceResult
from megatron_fsdp_v2_mcore.flags.arguments import API_FLAG, check_arguments, is_enabled
from megatron_fsdp_v2_mcore.flags.errors import (
    FlagError,
    flag_of,
    parser_errors_as_flag_errors,
    rejections_as_flag_errors,
)
from megatron_fsdp_v2_mcore.flags.precision import (
    DTYPE_OPTIONS,
    apply_main_grads_dtype,
    dtype_of,
    is_precision_aware,
    state_dtypes,
)
from megatron_fsdp_v2_patching import environment


def describe(flags: Sequence[str], num_ranks: int) -> SourceResult:
    """Describe a training, in a process without a process group.

    Args:
        flags: Training flags of `pretrain_gpt`.
        num_ranks: Number of ranks of the job.

    Raises:
        FlagsError: Megatron or this package rejects the flags.
        RuntimeError: This process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan needs a process that has no process group; start another one")
    with (
        environment({"WORLD_SIZE": str(num_ranks), "RANK": "0", "LOCAL_RANK": "0"}),
        contextlib.redirect_stdout(io.StringIO()),
        rehearse([*without_gpu_flags(flags), IMPL_FLAG, LOCAL]) as argv,
    ):
        return describe_in_rehearsal(argv, flags)


def describe_in_rehearsal(argv: Sequence[str], flags: Sequence[str]) -> SourceResult:
    """Describe a training, in a process that rehearses and has the environment of a rank.

    Args:
        argv: Flags that a CPU supports, with Megatron's own layers.
        flags: The user's flags.

    Raises:
        FlagsError: Megatron or this package rejects the flags.
    """
    from megatron.core import num_microbatches_calculator
    from megatron.training import global_vars

    from megatron_fsdp_v2_mcore import install, uninstall
    from megatron_fsdp_v2_mcore.plan.model import describe_training

    install()
    try:
        args, keeps_attention = _arguments(argv, flags)
        global_vars.set_args(args)
        with rejections_as_errors():
            return describe_training(args, keeps_attention=keeps_attention)
    finally:
        global_vars.destroy_global_vars()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        uninstall()


def _arguments(argv: Sequence[str], flags: Sequence[str]) -> tuple[Any, bool]:
    """Return Megatron's arguments, and whether the user's flags keep the attention matrix."""
    args, user_args = parse_flags(argv, flags)
    args.init_model_with_meta_device = True
    if args.vocab_size is None and args.padded_vocab_size is None:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        try:
            build_tokenizer(args)
        except Exception as error:
            raise FlagsError(
                f"the size of the vocabulary is unknown: the tokenizer cannot be read here "
                f"({error}); add --vocab-size"
            ) from None
    # `without_gpu_flags` has removed these flags.
    args.optimizer_cpu_offload = user_args.optimizer_cpu_offload
    args.use_precision_aware_optimizer = is_precision_aware(user_args)
    if args.use_precision_aware_optimizer:
        args.exp_avg_dtype, args.exp_avg_sq_dtype = state_dtypes(user_args)
        apply_main_grads_dtype(user_args)
        args.megatron_fsdp_main_grads_dtype = dtype_of(user_args.megatron_fsdp_main_grads_dtype)
    # The plan builds the model from Megatron's own layers, which have no quantized parameters.
    args.plans_fp4 = bool(user_args.fp4 and user_args.fp4_param_gather)
    args.plans_quantized = bool(user_args.fp8 and user_args.fp8_param_gather) or args.plans_fp4
    args.fp8_param_gather = False
    for name in ("fp8_recipe", "first_last_layers_bf16"):
        setattr(args, name, getattr(user_args, name))
    return args, getattr(user_args.attention_backend, "name", "") in ("unfused", "local")


@contextlib.contextmanager
def rejections_as_errors() -> Iterator[None]:
    """Convert errors of Megatron or this package about flags to `FlagsError`.

    Raises:
        FlagsError: Megatron or this package rejected the flags. The message is that of its error.
    """
    try:
        with rejections_as_flag_errors("Megatron rejects these flags"):
            yield
    except FlagError as error:
        raise FlagsError(str(error)) from None


def without_gpu_flags(argv: Sequence[str]) -> list[str]:
    """Return a command line without flags that need a GPU and do not change memory.

    The rehearsal replaces flags that choose kernels by those of a CPU.

    Args:
        argv: The user's flags.
    """
    values = {flag.name: flag.values for flag in GPU_FLAGS}
    values |= {flag.name: () for flag in CPU_FLAGS}
    # A plan builds Megatron's own layers, which have the same parameters.
    values[IMPL_FLAG] = ()
    # Dtypes of Transformer Engine's Adam; a plan reads them from the user's flags.
    values |= {flag_of(name): () for name in DTYPE_OPTIONS}
    # Megatron rejects this flag without --fp4-format, which needs Transformer Engine.
    values["--fp4-param-gather"] = ()
    # Megatron rejects this flag without --use-nccl-ub, which only a GPU can support.
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


def parse_flags(argv: Sequence[str], user_flags: Sequence[str]) -> tuple[Any, Any]:
    """Parse flags with Megatron, after `install()`.

    Args:
        argv: Flags that a CPU supports. Megatron validates them.
        user_flags: The user's own flags. This package checks them.

    Returns:
        The validated arguments of `argv`, and the parsed arguments of `user_flags`.

    Raises:
        FlagsError: Megatron or this package rejects the flags.
    """
    from megatron.training import arguments

    original_argv = sys.argv
    try:
        with rejections_as_errors(), parser_errors_as_flag_errors():
            sys.argv = ["plan", *(word for word in user_flags if word not in (FLAG, VERBOSE_FLAG))]
            user_args = arguments.parse_args()
            if not (is_enabled(user_args) and user_args.use_megatron_fsdp):
                raise FlagsError(
                    f"these flags train without this package; add --use-megatron-fsdp {API_FLAG}"
                )
            # A plan does not depend on the checkpoint to load.
            user_args.load = user_args.pretrained_checkpoint = None
            check_arguments(user_args)
            sys.argv = ["plan", *argv]
            args = arguments.parse_args()
            args.load = args.pretrained_checkpoint = None
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    finally:
        sys.argv = original_argv
    return args, user_args
