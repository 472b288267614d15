"""Combinations of flags that Megatron accepts and that a CPU does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cpu_rehearsal.errors import RehearsalError

__all__ = ["check_combinations", "with_checked_flags"]


def with_checked_flags(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pretrain` to check Megatron's arguments first."""

    def pretrain_if_supported(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        check_combinations(get_args())
        return pretrain(*args, **kwargs)

    return pretrain_if_supported


def check_combinations(args: Any) -> None:
    """Reject flags that would fail inside a layer.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        RehearsalError: Megatron's layers do not work with this combination; the message names it.
    """
    blocks = "--fp4-format" if args.fp4 else None
    if args.fp8 and args.fp8_recipe == "mxfp8":
        blocks = "--fp8-recipe mxfp8"
    if blocks and args.sequence_parallel:
        raise RehearsalError(
            f"{blocks} with --sequence-parallel cannot be used on a CPU: Transformer "
            "Engine gathers activations and scales in one coalesced collective, which gloo lacks; "
            "rehearse with another recipe, or without --sequence-parallel"
        )
    if args.multi_latent_attention and args.position_embedding_type == "yarn":
        raise RehearsalError(
            "--position-embedding-type yarn cannot be used with --multi-latent-attention: Megatron "
            "sets its parameters for other attentions only; add --position-embedding-type rope "
            "--rope-type yarn"
        )
    variant = args.experimental_attention_variant
    pattern = args.hybrid_layer_pattern or ""
    has_delta_nets = variant == "gated_delta_net" or "G" in pattern
    if has_delta_nets and not (args.swiglu or args.deterministic_mode):
        layers = f"--hybrid-layer-pattern {pattern}" if "G" in pattern else variant
        raise RehearsalError(
            f"gated delta nets ({layers}) need --swiglu: their convolution has the activation of "
            "the MLPs, and its kernel supports SiLU only"
        )
    recomputed = args.recompute_modules or []
    if args.recompute_granularity == "selective" and "mlp" in recomputed and args.add_bias_linear:
        raise RehearsalError(
            "--recompute-modules mlp without --disable-bias-linear cannot be used: the bias that "
            "Megatron's layer returns becomes an output of the recomputed function, and "
            "recomputation recurses without end; add --disable-bias-linear"
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
            "CPU: Megatron's sequential experts add their biases in place to the output of its own "
            "reduction; add --disable-bias-linear, or --moe-grouped-gemm"
        )
