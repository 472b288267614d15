"""Our flags on Megatron's command line, and checks before and after Megatron's own."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_fsdp_v2_mcore.flags.checkpoint_check import check_checkpoint_folder
from megatron_fsdp_v2_mcore.flags.combinations import (
    check_overlapping_experts,
    check_parallel_sizes,
)
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.flat_optimizer import check_flat_optimizer
from megatron_fsdp_v2_mcore.flags.offload import as_precision_aware, check_offload_flags
from megatron_fsdp_v2_mcore.flags.precision import (
    check_has_fused_adam,
    check_precision_flags,
    with_main_grads,
)
from megatron_fsdp_v2_mcore.flags.settings import (
    check_accumulation,
    check_hybrid,
    check_prefetch,
    check_quantized,
    reject_fields,
)
from megatron_fsdp_v2_mcore.flags.table import (
    EMERGING,
    OTHER_FLAGS,
    OWN_FLAGS,
    Flag,
    Handling,
    size,
)

__all__ = [
    "accepted_by_megatron",
    "add_arguments",
    "check_after",
    "check_before",
    "check_no_yaml",
    "is_enabled",
    "reject_model_options",
    "supported_on_cpu",
    "with_arguments",
    "without_yaml",
]

API_FLAG = "--use-fsdp-fully-shard-api"
_OFFLOAD_FLAG = "--optimizer-cpu-offload"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser."""
    group = parser.add_argument_group(title="megatron_fsdp_v2")
    group.add_argument(
        API_FLAG,
        action="store_true",
        help="With --use-megatron-fsdp: shard with megatron_fsdp_v2's per-module fully_shard().",
    )
    for flag in OWN_FLAGS:
        if flag.value is None:
            group.add_argument(flag.flag, action="store_true", help=flag.meaning)
        elif isinstance(flag.value, tuple):
            group.add_argument(flag.flag, choices=flag.value, help=flag.meaning)
        else:
            metavar = "SIZE" if flag.value is size else "N"
            group.add_argument(flag.flag, type=flag.value, metavar=metavar, help=flag.meaning)
    return parser


def is_enabled(args: Any) -> bool:
    """Whether the command line selects this package."""
    return bool(getattr(args, "use_fsdp_fully_shard_api", False))


UNSUPPORTED = tuple(flag for flag in OTHER_FLAGS if flag.handling is Handling.REJECTED)

_OF_A_MODEL = Flag(
    "cpu_offloading_weights",
    Handling.REJECTED,
    "gathered weights have no memory between forward and backward, so that there is nothing to "
    "offload; cpu_offloading of activations alone is fine",
    flag="no flag of its own",
)
"""A field of `TransformerConfig` alone."""


def check_before(args: Any) -> None:
    """Check the command line before Megatron validates (and rewrites) it.

    Raises:
        FlagError: Flags are missing, or cannot be supported together.
    """
    if not is_enabled(args):
        for flag in OWN_FLAGS:
            if getattr(args, flag.name, None):
                raise FlagError(f"{flag.flag} needs {API_FLAG}; add it, or leave both out")
        return
    if not args.use_megatron_fsdp:
        raise FlagError(f"{API_FLAG} needs --use-megatron-fsdp; add it, or leave both out")
    if args.ckpt_format != "fsdp_dtensor":
        raise FlagError(
            f"--ckpt-format {args.ckpt_format} cannot be used with {API_FLAG}; "
            "use --ckpt-format fsdp_dtensor"
        )
    for flag in OWN_FLAGS:
        is_given = getattr(args, flag.name, None)
        if flag.needs and is_given and not any(getattr(args, name) for name in flag.needs):
            needed = " or ".join(map(flag_of, flag.needs))
            raise FlagError(f"{flag.flag} needs {needed}; add it, or leave both out")
    reject_fields(args)
    check_hybrid(args, args.expert_data_parallel_sharding_strategy)
    check_accumulation(args, args.expert_data_parallel_sharding_strategy)
    check_quantized(args)
    check_offload_flags(args)
    check_prefetch(args.suggested_communication_unit_size, args.fsdp_unshard_prefetch_bytes)
    for refusal in UNSUPPORTED:
        value = getattr(args, refusal.name, None)
        if refusal.rejects(value):
            shown = "" if value is True else f" {value}"
            raise FlagError(
                f"{refusal.flag}{shown} cannot be used with {API_FLAG}: {refusal.meaning}"
            )
    if args.init_model_with_meta_device and args.data_parallel_sharding_strategy == "no_shard":
        raise FlagError(
            "--init-model-with-meta-device cannot be used with --data-parallel-sharding-strategy "
            "no_shard: Megatron offers it for sharded weights or optimizer state only"
        )
    if args.fp16 and args.optimizer in EMERGING:
        raise FlagError(
            f"--fp16 cannot be used with --optimizer {args.optimizer}: Megatron offers it with "
            "bf16 and fp32 only; use --bf16"
        )
    check_precision_flags(args)
    check_flat_optimizer(args)
    check_parallel_sizes(args)
    check_overlapping_experts(args)
    if args.load is not None:
        check_checkpoint_folder(
            args.load,
            may_be_empty=args.load == args.save,
            iteration=args.ckpt_step,
        )


_FILLED_IN = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Options of a model that Megatron gives a value where they were left out."""


def reject_model_options(config: Any) -> None:
    """Reject options of a model by name, where no command line was checked before.

    Args:
        config: Megatron's `TransformerConfig`.

    Raises:
        FlagError: A field has a value that cannot be supported.
    """
    check_overlapping_experts(config, is_config=True)
    for refusal in (*UNSUPPORTED, _OF_A_MODEL):
        if refusal.name in _FILLED_IN or not hasattr(config, refusal.name):
            continue
        value = getattr(config, refusal.name)
        if refusal.rejects(value):
            raise FlagError(
                f"{type(config).__name__}.{refusal.name} = {value!r} ({refusal.flag}) cannot be "
                f"used with sharded parameters: {refusal.meaning}"
            )


@contextlib.contextmanager
def accepted_by_megatron(args: Any) -> Iterator[None]:
    """Have Megatron validate arguments that it would reject, or turn off, without this package."""
    if not is_enabled(args):
        yield
        return
    with (
        _as_adam(args),
        _with_worker(args),
        _without_weight_check(args),
        as_precision_aware(args),
        with_main_grads(args),
    ):
        yield


@contextlib.contextmanager
def _as_adam(args: Any) -> Iterator[None]:
    """Have Megatron validate arguments with `--optimizer adam` where ours is one it would reject.

    Megatron rejects other optimizers together with --use-megatron-fsdp, because its own wrapper
    cannot step them, and turns its distributed optimizer off for them. For ours everything it
    derives has to be as it is for Adam. The name is put back afterwards.
    """
    name = getattr(args, "optimizer", None)
    if name not in EMERGING:
        yield
        return
    args.optimizer = "adam"
    try:
        yield
    finally:
        args.optimizer = name
    if args.rank == 0:
        sys.stdout.write(f"optimizer: {name}; Megatron's list of arguments shows adam for it\n")


@contextlib.contextmanager
def _with_worker(args: Any) -> Iterator[None]:
    """Have Megatron validate `--async-save` with the worker process that it would ask for.

    It turns asynchronous saves off without one. Here a thread writes, so that afterwards there is
    neither a worker to start nor a strategy to choose one by.
    """
    if not args.async_save:
        yield
        return
    args.use_persistent_ckpt_worker = True
    try:
        yield
    finally:
        args.use_persistent_ckpt_worker = False
        args.async_strategy = "mcore"


@contextlib.contextmanager
def _without_weight_check(args: Any) -> Iterator[None]:
    """Have Megatron validate arguments without its check of weights, which it rejects with ZeRO-3.

    Its own compares what ranks hold; the one in its place gathers what is sharded.
    """
    name = "check_weight_hash_across_dp_replicas_interval"
    interval = getattr(args, name)
    setattr(args, name, None)
    try:
        yield
    finally:
        setattr(args, name, interval)


def check_after(args: Any) -> None:
    """Check what Megatron made of the command line.

    Raises:
        FlagError: Megatron turned something on that cannot be supported.
    """
    if is_enabled(args) and not args.use_distributed_optimizer:
        raise FlagError(f"{API_FLAG} needs Megatron's distributed optimizer, which was turned off")
    if is_enabled(args):
        check_has_fused_adam(args)


def check_no_yaml(args: Any, argv: Sequence[str]) -> None:
    """Check that a configuration file does not replace the command line that selects us.

    With `--yaml-cfg` Megatron forgets every flag it does not know from the file, ours included,
    and its own wrapper would be used without a word.

    Args:
        args: What Megatron read from the file.
        argv: The command line.

    Raises:
        FlagError: One of the two selects this package.
    """
    if API_FLAG in argv or is_enabled(args):
        raise FlagError(
            f"--yaml-cfg cannot be used with {API_FLAG}: Megatron takes all arguments from the "
            "file then and checks none of these; give them on the command line"
        )


def supported_on_cpu(argv: Sequence[str]) -> tuple[str, ...]:
    """Names of flags that Megatron supports on a GPU alone and this package on a CPU too.

    Args:
        argv: The command line; it may not select this package.
    """
    if API_FLAG not in argv:
        return ()
    if _OFFLOAD_FLAG not in argv:
        return ("--use-nccl-ub",)
    # Megatron requires the last flag with offload.
    return ("--use-nccl-ub", _OFFLOAD_FLAG, "--use-precision-aware-optimizer")


def with_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `add_megatron_arguments` that adds the flags of this package."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(original(parser))

    return add_megatron_arguments


def without_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `validate_yaml` that rejects a file where this package is selected."""

    def validate_yaml(args: Any, *rest: Any, **kwargs: Any) -> Any:
        check_no_yaml(args, sys.argv)
        return original(args, *rest, **kwargs)

    return validate_yaml
