"""Our flags on Megatron's command line, and checks before and after Megatron's own."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2.layout.placement import STRATEGIES
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
from megatron_fsdp_v2_mcore.flags.table import EMERGING, OTHER_FLAGS, Flag, Handling

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
_OUR_OTHER_FLAGS = (
    "expert_data_parallel_sharding_strategy",
    "fsdp_trace_pool",
    "log_per_param_norm",
    "fsdp_unshard_prefetch_depth",
    "fsdp_unshard_prefetch_bytes",
    "fsdp_unshard_after_step",
    "fsdp_max_live_grad_buffers",
    "fsdp_bucket_bytes",
    "fsdp_flat_optimizer",
)
_NEEDED_FOR = {
    "fsdp_unshard_prefetch_depth": ("overlap_param_gather",),
    "fsdp_unshard_prefetch_bytes": ("overlap_param_gather",),
    "fsdp_unshard_after_step": ("overlap_param_gather",),
    "fsdp_max_live_grad_buffers": ("overlap_grad_reduce",),
    "fsdp_bucket_bytes": ("overlap_param_gather", "overlap_grad_reduce"),
}
"""Flags that say how to overlap, and one of which flags says that there is something to."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser."""
    group = parser.add_argument_group(title="megatron_fsdp_v2")
    group.add_argument(
        API_FLAG,
        action="store_true",
        help="With --use-megatron-fsdp: shard with megatron_fsdp_v2's per-module fully_shard().",
    )
    group.add_argument(
        "--expert-data-parallel-sharding-strategy",
        choices=list(STRATEGIES),
        default=None,
        help="Sharding strategy of the parameters of experts; default: that of all others, "
        "--data-parallel-sharding-strategy.",
    )
    group.add_argument(
        "--fsdp-trace-pool",
        action="store_true",
        help="Put gathered weights and gradient buffers at planned addresses of one block of "
        "memory, after the first iterations have shown when each of them lives.",
    )
    group.add_argument(
        "--fsdp-unshard-prefetch-depth",
        type=_at_least_one,
        metavar="N",
        default=None,
        help="Units gathered ahead of the one at work; default 1, or any number where bytes limit "
        "it. Each costs the gathered weights of one more unit. Needs --overlap-param-gather.",
    )
    group.add_argument(
        "--fsdp-unshard-prefetch-bytes",
        type=_size,
        metavar="SIZE",
        default=None,
        help="Bytes of gathered weights that units gathered ahead take together at most, such as "
        "2GiB; the next unit is gathered ahead whatever it takes. Default: what "
        "--suggested-communication-unit-size says, or no limit of bytes. Needs "
        "--overlap-param-gather.",
    )
    group.add_argument(
        "--fsdp-unshard-after-step",
        action="store_true",
        help="Have the optimizer's step gather what the next forward begins with, so that what the "
        "host does until then overlaps these gathers. Holds their gathered weights meanwhile. "
        "Needs --overlap-param-gather.",
    )
    group.add_argument(
        "--fsdp-max-live-grad-buffers",
        type=_at_least_one,
        metavar="N",
        default=None,
        help="Units that have full gradient buffers at a time; default 2. Each costs one more "
        "buffer. Needs --overlap-grad-reduce.",
    )
    group.add_argument(
        "--fsdp-bucket-bytes",
        type=_size,
        metavar="SIZE",
        default=None,
        help="Units smaller than this share collectives: those that follow each other are gathered "
        "in one, and reduced in one, up to so many bytes, such as 4MiB. Default: a collective for "
        "every unit. Needs --overlap-param-gather or --overlap-grad-reduce.",
    )
    group.add_argument(
        "--fsdp-flat-optimizer",
        action="store_true",
        help="Have Adam step a few flat tensors instead of every parameter: the rows of a unit, "
        "which are next to each other in memory. Results and checkpoints are the same. Needs "
        "--optimizer adam, on the device and with state in fp32.",
    )
    group.add_argument(
        "--log-per-param-norm",
        action="store_true",
        help="Log the norm of every weight and gradient (before clipping) at every --log-interval: "
        "to TensorBoard and Weights & Biases where they are on, and on rank 0.",
    )
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
        for name in _OUR_OTHER_FLAGS:
            if getattr(args, name, None):
                raise FlagError(f"{flag_of(name)} needs {API_FLAG}; add it, or leave both out")
        return
    if not args.use_megatron_fsdp:
        raise FlagError(f"{API_FLAG} needs --use-megatron-fsdp; add it, or leave both out")
    if args.ckpt_format != "fsdp_dtensor":
        raise FlagError(
            f"--ckpt-format {args.ckpt_format} cannot be used with {API_FLAG}; "
            "use --ckpt-format fsdp_dtensor"
        )
    for name, needed in _NEEDED_FOR.items():
        if getattr(args, name, None) and not any(getattr(args, n) for n in needed):
            flags = " or ".join(map(flag_of, needed))
            raise FlagError(f"{flag_of(name)} needs {flags}; add it, or leave both out")
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
