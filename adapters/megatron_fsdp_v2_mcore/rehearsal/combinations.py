"""Combinations of flags that Megatron accepts and cannot train with, most in local layers."""

from __future__ import annotations

from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.rehearsal.flags import RehearsalError

__all__ = ["check_combinations"]


def check_combinations(args: Any) -> None:
    """Reject what would end with an error within a layer.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        FlagError: They ask for layers that do not work together; names the flags.
    """
    if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise FlagError(
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} needs --sequence-parallel: without it Megatron's "
            "layers of experts do not train"
        )
    blocks = "--fp4-format" if args.fp4 else None
    if args.fp8 and args.fp8_recipe == "mxfp8":
        blocks = "--fp8-recipe mxfp8"
    if blocks and args.sequence_parallel:
        raise RehearsalError(
            f"{blocks} with --sequence-parallel cannot be used on a CPU: Transformer "
            "Engine gathers activations and scales in one coalesced collective, which gloo lacks; "
            "rehearse with another recipe, or without --sequence-parallel"
        )
    if args.transformer_impl != "local":
        return
    has_sequential = bool(args.num_experts) and not args.moe_grouped_gemm
    ranks = args.expert_model_parallel_size * (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    if has_sequential and args.num_experts > 1 and args.add_bias_linear and ranks == 1:
        raise RehearsalError(
            f"--num-experts {args.num_experts} without --disable-bias-linear cannot be used on a "
            "CPU: Megatron's sequential experts add their biases in place to what its own "
            "reduction hands through; add --disable-bias-linear, or --moe-grouped-gemm"
        )
    recomputed = args.recompute_modules or []
    if args.recompute_granularity == "selective" and "mlp" in recomputed and args.add_bias_linear:
        raise RehearsalError(
            "--recompute-modules mlp without --disable-bias-linear cannot be used: the bias that "
            "Megatron's layer hands back becomes an output of the recomputed function, and "
            "recomputation recurses without end; add --disable-bias-linear"
        )
