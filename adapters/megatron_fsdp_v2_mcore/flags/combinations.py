"""Checks of combinations of Megatron's flags."""

from __future__ import annotations

from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

__all__ = [
    "check_overlapping_experts",
    "check_parallel_sizes",
]


def check_overlapping_experts(source: Any, *, is_config: bool = False) -> None:
    """Check options that depend on `--overlap-moe-expert-parallel-comm`.

    Args:
        source: Megatron's arguments, or a `TransformerConfig`.
        is_config: Whether `source` is a `TransformerConfig`. Messages then name its fields.

    Raises:
        FlagError: A combination is not supported. The message names the flags.
    """

    def shown(name: str) -> str:
        flag = flag_of(name)
        value = getattr(source, name)
        return f"{type(source).__name__}.{name} = {value} ({flag})" if is_config else flag

    overlaps = getattr(source, "overlap_moe_expert_parallel_comm", False)
    if not overlaps and getattr(source, "delay_wgrad_compute", False):
        raise FlagError(
            f"{shown('delay_wgrad_compute')} needs "
            "--overlap-moe-expert-parallel-comm: only its schedule signals when all weight "
            "gradients of a layer are computed"
        )
    if overlaps and getattr(source, "moe_latent_size", None):
        raise FlagError(
            f"{shown('moe_latent_size')} cannot be used with "
            "--overlap-moe-expert-parallel-comm: Megatron projects from the latent space back on "
            "the stream of the all-to-all, which does not wait for the weights of the layer; leave "
            "one of them out"
        )


def check_parallel_sizes(args: Any) -> None:
    """Check that the parallel sizes divide the ranks and experts.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: A size does not divide them, or a combination is not supported. The message
            names the flags.
    """
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, expert = args.context_parallel_size, args.expert_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    ranks = args.world_size
    if ranks % (tensor * pipeline * context):
        raise FlagError(
            f"{ranks} ranks cannot be divided by --tensor-model-parallel-size {tensor} x "
            f"--pipeline-model-parallel-size {pipeline} x --context-parallel-size {context}"
        )
    apart = tensor * context != expert * expert_tensor
    if args.use_tp_pp_dp_mapping and pipeline > 1 and apart:
        raise FlagError(
            f"--use-tp-pp-dp-mapping cannot be used with --pipeline-model-parallel-size {pipeline} "
            f"and --tensor-model-parallel-size {tensor} x --context-parallel-size {context} beside "
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size "
            f"{expert_tensor}: Megatron requires equal products; omit --use-tp-pp-dp-mapping"
        )
    variant = getattr(args, "experimental_attention_variant", None)
    if variant == "gated_delta_net" and tensor > 1:
        raise FlagError(
            f"--experimental-attention-variant {variant} cannot be used with "
            f"--tensor-model-parallel-size {tensor}: Megatron does not describe how its fused "
            "projections are sharded, which checkpoints need"
        )
    if expert == 1:
        return
    if not args.num_experts:
        raise FlagError(f"--expert-model-parallel-size {expert} needs --num-experts")
    if args.num_experts % expert:
        raise FlagError(
            f"--num-experts {args.num_experts} cannot be divided by "
            f"--expert-model-parallel-size {expert}"
        )
    if ranks % (expert * expert_tensor * pipeline):
        raise FlagError(
            f"{ranks} ranks cannot be divided by --expert-model-parallel-size {expert} x "
            f"--expert-tensor-parallel-size {expert_tensor} x "
            f"--pipeline-model-parallel-size {pipeline}"
        )
