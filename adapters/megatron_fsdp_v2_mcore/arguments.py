"""Our flags on Megatron's command line, and checks before and after Megatron's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2_mcore.checkpoint_check import check_checkpoint_folder
from megatron_fsdp_v2_mcore.errors import FlagError
from megatron_fsdp_v2_mcore.settings import refuse_fields

__all__ = ["add_arguments", "check_after", "check_before", "is_enabled"]

API_FLAG = "--use-fsdp-fully-shard-api"


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
        choices=["no_shard", "optim", "optim_grads", "optim_grads_params"],
        default=None,
        help="Sharding strategy of the parameters of experts; default: that of all others, "
        "--data-parallel-sharding-strategy.",
    )
    return parser


def is_enabled(args: Any) -> bool:
    """Whether the command line selects this package."""
    return bool(getattr(args, "use_fsdp_fully_shard_api", False))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A flag that does not configure data parallelism itself but cannot be combined with ours.

    Attributes:
        name: Attribute of Megatron's arguments.
        flag: What a user types.
        reason: Why not.
        refuses: Whether a value is refused.
    """

    name: str
    flag: str
    reason: str
    refuses: Callable[[Any], bool] = bool


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "use_precision_aware_optimizer",
        "--use-precision-aware-optimizer",
        "the optimizer reads param.grad, not a decoupled gradient",
    ),
    Refusal(
        "optimizer_cpu_offload", "--optimizer-cpu-offload", "optimizer offload is not built yet"
    ),
    Refusal(
        "gradient_accumulation_fusion",
        "--no-gradient-accumulation-fusion (add it)",
        "weight gradients written by a fused kernel are not built yet",
    ),
    Refusal("fp8", "--fp8-format", "quantised parameters are not built yet"),
    Refusal("fp4", "--fp4-format", "quantised parameters are not built yet"),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        "its schedule bypasses the hooks of the units",
    ),
    Refusal(
        "cuda_graph_impl",
        "--cuda-graph-impl",
        "gathers are issued from the host",
        lambda value: value not in (None, "none"),
    ),
    Refusal(
        "optimizer",
        "--optimizer",
        "Megatron's distributed optimizer, which steps the shards, takes adam only",
        lambda value: value not in (None, "adam"),
    ),
    Refusal("async_save", "--async-save", "asynchronous checkpoints are not built yet"),
)


def check_before(args: Any) -> None:
    """Check the command line before Megatron validates (and rewrites) it.

    Raises:
        FlagError: Flags are missing, or cannot be honoured together.
    """
    if not is_enabled(args):
        return
    if not args.use_megatron_fsdp:
        raise FlagError(f"{API_FLAG} needs --use-megatron-fsdp; add it, or leave both out")
    if args.ckpt_format != "fsdp_dtensor":
        raise FlagError(
            f"--ckpt-format {args.ckpt_format} cannot be used with {API_FLAG}; "
            "use --ckpt-format fsdp_dtensor"
        )
    refuse_fields(args)
    for refusal in REFUSALS:
        value = getattr(args, refusal.name, None)
        if refusal.refuses(value):
            shown = "" if value is True else f" {value}"
            raise FlagError(
                f"{refusal.flag}{shown} cannot be used with {API_FLAG}: {refusal.reason}"
            )
    if args.load is not None:
        check_checkpoint_folder(
            args.load,
            may_be_empty=args.load == args.save,
            iteration=args.ckpt_step,
        )


def check_after(args: Any) -> None:
    """Check what Megatron made of the command line.

    Raises:
        FlagError: Megatron turned something on that cannot be honoured.
    """
    if is_enabled(args) and not args.use_distributed_optimizer:
        raise FlagError(f"{API_FLAG} needs Megatron's distributed optimizer, which was turned off")
