"""Flags of Megatron that do not configure sharding and still cannot be combined with it.

Most of them read what Megatron's own wrappers hang on a model (`main_grad`, gradient buckets,
whole weights on every rank), which sharded parameters do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

__all__ = [
    "MODEL_REFUSALS",
    "MORE_REFUSALS",
    "UnsupportedFlag",
    "check_overlapping_experts",
    "check_parallel_sizes",
]


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """A flag that does not configure data parallelism itself but cannot be combined with ours.

    Attributes:
        name: Attribute of Megatron's arguments.
        flag: What a user types.
        reason: Why not.
        rejects: Whether a value is rejected.
    """

    name: str
    flag: str
    reason: str
    rejects: Callable[[Any], bool] = bool


def _is_given(value: Any) -> bool:
    return value is not None


_ONE_RANK = "it saves what one rank holds, which is some rows of each parameter"
_GRAPHS = "gathers are issued from the host"
_LATE_GRADS = (
    "it makes gradients of weights after the backward of their layer, which reduces what there is "
    "when it ends"
)
_QUANTIZED = "it may quantize weights in ways that no weight format is built for; --fp8-recipe does"
_READ_BACK = "Megatron cannot read such a checkpoint back in the fsdp_dtensor format"
_GTP = "weights are sharded over data-parallel ranks already; leave it out"
_GROUPED = "experts stacked in Transformer Engine's GroupedTensor cannot be sharded by rows"

MORE_REFUSALS: tuple[UnsupportedFlag, ...] = (
    # Another wrapper, or none.
    UnsupportedFlag("use_torch_fsdp2", "--use-torch-fsdp2", "it selects PyTorch's wrapper instead"),
    UnsupportedFlag(
        "freeze_all_layers",
        "--freeze-all-layers",
        "Megatron turns off the distributed optimizer for it, and with nothing to train there is "
        "nothing to reduce",
    ),
    UnsupportedFlag(
        "perform_rl_step",
        "--perform-rl-step",
        "it copies whole weights between a training and an inference model",
    ),
    UnsupportedFlag(
        "moe_use_upcycling",
        "--moe-use-upcycling",
        "it copies whole weights from a dense model; upcycle without this package, then load",
    ),
    UnsupportedFlag(
        "fake_process_group",
        "--fake-process-group",
        "ranks compare what they sharded, and a fake group gives no answers",
    ),
    # Weights and gradients in other places.
    UnsupportedFlag("save_wgrads_interval", "--save-wgrads-interval", _ONE_RANK, _is_given),
    UnsupportedFlag("save_params_interval", "--save-params-interval", _ONE_RANK, _is_given),
    UnsupportedFlag(
        "dump_param_to_param_group_map",
        "--dump-param-to-param-group-map",
        "Megatron writes it for its own wrapper only",
        _is_given,
    ),
    UnsupportedFlag(
        "load_main_params_from_ckpt",
        "--load-main-params-from-ckpt",
        "a checkpoint of sharded parameters holds main weights only; leave it out",
    ),
    UnsupportedFlag(
        "qk_clip",
        "--qk-clip",
        "it changes attention weights head by head, of which a rank holds some rows",
    ),
    UnsupportedFlag(
        "use_transformer_engine_op_fuser",
        "--use-transformer-engine-op-fuser",
        "its fused experts ask for gradient buffers in the forward, where there are none",
    ),
    # Gradients that come after the backward of their unit.
    UnsupportedFlag(
        "defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", _LATE_GRADS
    ),
    UnsupportedFlag(
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        _LATE_GRADS,
    ),
    # Communication that units decide on.
    UnsupportedFlag(
        "overlap_param_gather_with_optimizer_step",
        "--overlap-param-gather-with-optimizer-step",
        "gathers are issued by the units, during the forward; use --overlap-param-gather",
    ),
    UnsupportedFlag(
        "enable_full_sharding_in_hsdp",
        "--enable-full-sharding-in-hsdp",
        "use --outer-dp-sharding-strategy optim instead",
    ),
    UnsupportedFlag(
        "tensor_parallel_num_weight_shards", "--tensor-parallel-num-weight-shards", _GTP
    ),
    UnsupportedFlag(
        "expert_tensor_parallel_num_weight_shards",
        "--expert-tensor-parallel-num-weight-shards",
        _GTP,
    ),
    UnsupportedFlag(
        "hybrid_context_parallel",
        "--hybrid-context-parallel",
        "Megatron does not offer it with --use-megatron-fsdp",
    ),
    # CUDA graphs, by their other names.
    UnsupportedFlag("enable_cuda_graph", "--enable-cuda-graph", _GRAPHS),
    UnsupportedFlag("external_cuda_graph", "--external-cuda-graph", _GRAPHS),
    UnsupportedFlag(
        "optimizer_cuda_graph",
        "--optimizer-cuda-graph",
        "a replayed step tells no unit that its weights have changed",
    ),
    # Other kinds of parameters.
    UnsupportedFlag(
        "te_precision_config_file", "--te-precision-config-file", _QUANTIZED, _is_given
    ),
    UnsupportedFlag("moe_single_grouped_weight", "--moe-single-grouped-weight", _GROUPED),
    UnsupportedFlag("moe_single_grouped_bias", "--moe-single-grouped-bias", _GROUPED),
    # Checkpoints of other kinds.
    UnsupportedFlag(
        "non_persistent_ckpt_type", "--non-persistent-ckpt-type", _READ_BACK, _is_given
    ),
    UnsupportedFlag(
        "non_persistent_save_interval",
        "--non-persistent-save-interval",
        _READ_BACK,
        _is_given,
    ),
    UnsupportedFlag(
        "pretrained_checkpoint",
        "--pretrained-checkpoint",
        "Megatron looks for the contents of an fsdp_dtensor checkpoint in --load; name it there, "
        "with --finetune",
        _is_given,
    ),
    UnsupportedFlag(
        "verify_integrity",
        "--verify-integrity",
        "Megatron hashes the files of torch_dist checkpoints only; leave it out",
    ),
    UnsupportedFlag(
        "ckpt_convert_format",
        "--ckpt-convert-format",
        "Megatron would write sharded parameters in a format of whole ones",
        _is_given,
    ),
)
"""What else is rejected, beside the features that `arguments.UNSUPPORTED` begins with."""


MODEL_REFUSALS: tuple[UnsupportedFlag, ...] = (
    UnsupportedFlag(
        "cpu_offloading_weights",
        "no flag of its own",
        "gathered weights have no memory between forward and backward, so that there is nothing to "
        "offload; cpu_offloading of activations alone is fine",
    ),
)
"""What is rejected in a `TransformerConfig` alone: it is no flag, or another table has it."""


def check_overlapping_experts(source: Any, *, is_config: bool = False) -> None:
    """Check what goes together with layers whose parts are run one by one.

    Args:
        source: Megatron's arguments, or a `TransformerConfig`.
        is_config: Whether it is the latter, whose fields are named then.

    Raises:
        FlagError: Something does not; names the flags.
    """

    def shown(name: str) -> str:
        flag = flag_of(name)
        value = getattr(source, name)
        return f"{type(source).__name__}.{name} = {value} ({flag})" if is_config else flag

    overlaps = getattr(source, "overlap_moe_expert_parallel_comm", False)
    if not overlaps and getattr(source, "delay_wgrad_compute", False):
        raise FlagError(
            f"{shown('delay_wgrad_compute')} needs "
            "--overlap-moe-expert-parallel-comm: only its schedule says when the gradients of all "
            "weights of a layer are there"
        )
    if overlaps and getattr(source, "moe_latent_size", None):
        raise FlagError(
            f"{shown('moe_latent_size')} cannot be used with "
            "--overlap-moe-expert-parallel-comm: Megatron projects from the latent space back on "
            "the stream of the all-to-all, which does not wait for the weights of the layer; leave "
            "one of them out"
        )


def check_parallel_sizes(args: Any) -> None:
    """Check that ranks and experts can be divided as the command line says.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: They cannot; names the flags.
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
            f"{expert_tensor}: Megatron wants the two products to be equal; leave it out"
        )
    variant = getattr(args, "experimental_attention_variant", None)
    if variant == "gated_delta_net" and tensor > 1:
        raise FlagError(
            f"--experimental-attention-variant {variant} cannot be used with "
            f"--tensor-model-parallel-size {tensor}: Megatron does not say how its fused "
            "projections are cut, so that a checkpoint could not be put together"
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
