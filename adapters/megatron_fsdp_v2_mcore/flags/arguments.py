"""Adds this package's flags to Megatron's parser; checks flags before and after Megatron does."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_fsdp_v2_mcore.flags.checkpoint_check import check_checkpoint_folder
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.local_checkpoints import check_local_checkpoints
from megatron_fsdp_v2_mcore.flags.precision import (
    apply_main_grads_dtype,
    check_has_fused_adam,
    check_optimizer_flags,
    offloads,
)
from megatron_fsdp_v2_mcore.flags.settings import check_sharding, reject
from megatron_fsdp_v2_mcore.flags.table import EMERGING, OWN_FLAGS, size

API_FLAG = "--use-fsdp-fully-shard-api"
_OFFLOAD_FLAG = "--optimizer-cpu-offload"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package to Megatron's parser."""
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


def selects_this_package(args: Any, argv: Sequence[str]) -> bool:
    """Whether the command line selects this package, or would without a YAML file.

    Args:
        args: Megatron's arguments, perhaps read from a YAML file.
        argv: The command line.
    """
    reads_file = getattr(args, "yaml_cfg", None) is not None
    return is_enabled(args) or (reads_file and API_FLAG in argv)


def check_arguments(args: Any) -> None:
    """Check the command line before Megatron validates and changes it.

    Raises:
        FlagError: A required flag is missing, or a flag or combination is not supported.
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
        if flag.needs and is_given and not getattr(args, flag.needs):
            raise FlagError(f"{flag.flag} needs {flag_of(flag.needs)}; add it, or leave both out")
    reject(args)
    check_sharding(
        args, args.expert_data_parallel_sharding_strategy, args.fsdp_unshard_prefetch_bytes
    )
    if args.init_model_with_meta_device and args.data_parallel_sharding_strategy == "no_shard":
        raise FlagError(
            "--init-model-with-meta-device cannot be used with --data-parallel-sharding-strategy "
            "no_shard: Megatron supports it for sharded weights or optimizer state only"
        )
    is_freed = args.data_parallel_sharding_strategy == "optim_grads_params"
    is_tied = not args.untie_embeddings_and_output_weights
    if args.save_activations_interval is not None and is_freed and is_tied:
        raise FlagError(
            "--save-activations-interval cannot be used with --data-parallel-sharding-strategy "
            "optim_grads_params and a tied embedding, which it would save after the output layer "
            "has released it; add --untie-embeddings-and-output-weights, or use optim_grads"
        )
    if args.fp16 and args.optimizer in EMERGING:
        raise FlagError(
            f"--fp16 cannot be used with --optimizer {args.optimizer}: Megatron supports it with "
            "bf16 and fp32 only; use --bf16"
        )
    check_optimizer_flags(args)
    _check_parallel_sizes(args)
    _check_overlapping_experts(args)
    _check_repeated_layers(args)
    check_local_checkpoints(args)
    if args.load is not None:
        may_be_empty = args.load == args.save
        check_checkpoint_folder(args.load, may_be_empty=may_be_empty, iteration=args.ckpt_step)


def _check_overlapping_experts(source: Any) -> None:
    """Check options that depend on `--overlap-moe-expert-parallel-comm`.

    Args:
        source: Megatron's arguments, or a `TransformerConfig`, whose fields messages then name.

    Raises:
        FlagError: A combination is not supported. The message names the flags.
    """

    def describe(name: str) -> str:
        flag = flag_of(name)
        if isinstance(source, argparse.Namespace):
            return flag
        return f"{type(source).__name__}.{name} = {getattr(source, name)} ({flag})"

    overlaps = getattr(source, "overlap_moe_expert_parallel_comm", False)
    if not overlaps and getattr(source, "delay_wgrad_compute", False):
        raise FlagError(
            f"{describe('delay_wgrad_compute')} needs "
            "--overlap-moe-expert-parallel-comm: only its schedule signals when all weight "
            "gradients of a layer are computed"
        )
    if overlaps and getattr(source, "moe_latent_size", None):
        raise FlagError(
            f"{describe('moe_latent_size')} cannot be used with "
            "--overlap-moe-expert-parallel-comm: Megatron projects from the latent space back on "
            "the stream of the all-to-all, which does not wait for the weights of the layer; leave "
            "one of them out"
        )


def _check_repeated_layers(source: Any) -> None:
    """Check options with which a layer runs several times in one micro-batch.

    Args:
        source: Megatron's arguments, or a `TransformerConfig`.

    Raises:
        FlagError: Gradients would be lost. The message names the flags.
    """
    if getattr(source, "transformer_impl", None) != "transformer_engine":
        return
    depth = getattr(source, "mtp_num_layers", None) or 0
    repeated = {
        "mlp_chunks_for_training": getattr(source, "mlp_chunks_for_training", 1) > 1,
        "mtp_use_repeated_layer": getattr(source, "mtp_use_repeated_layer", False) and depth > 1,
    }
    for name, is_repeated in repeated.items():
        if is_repeated and source.gradient_accumulation_fusion:
            raise FlagError(
                f"{flag_of(name)} needs --no-gradient-accumulation-fusion: in the first "
                "micro-batch of a run, and of every iteration in FP8, the first use of a layer of "
                "Transformer Engine overwrites the gradients of its later uses"
            )


def _check_parallel_sizes(args: Any) -> None:
    """Check that the parallel sizes divide the ranks and experts.

    Raises:
        FlagError: A size does not divide them, or a combination is not supported. The message
            names the flags.
    """
    dense = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    experts = ("expert_model_parallel_size", "expert_tensor_parallel_size", dense[1])
    instances = "num_distributed_optimizer_instances"
    sizes = {name: getattr(args, name) for name in (*dense, *experts, "num_experts", instances)}
    tensor, pipeline, context = (sizes[name] for name in dense)
    sizes["expert_tensor_parallel_size"] = sizes["expert_tensor_parallel_size"] or tensor
    expert, expert_tensor, _ = (sizes[name] for name in experts)

    def flags(*names: str) -> str:
        return " x ".join(f"{flag_of(name)} {sizes[name]}" for name in names)

    outer = (instances,) if sizes[instances] > 1 else ()
    for names in [(*part, *outer) for part in ((dense, experts) if expert > 1 else (dense,))]:
        if args.world_size % math.prod(sizes[name] for name in names):
            raise FlagError(f"{args.world_size} ranks cannot be divided by {flags(*names)}")
    differ = tensor * context != expert * expert_tensor
    if args.use_tp_pp_dp_mapping and pipeline > 1 and differ:
        raise FlagError(
            f"--use-tp-pp-dp-mapping cannot be used with {flags(dense[1])} and "
            f"{flags(dense[0], dense[2])} beside {flags(*experts[:2])}: Megatron requires equal "
            "products; omit --use-tp-pp-dp-mapping"
        )
    variant = getattr(args, "experimental_attention_variant", None)
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    if tensor > 1 and (variant == "gated_delta_net" or "G" in pattern):
        layers = f"--hybrid-layer-pattern {pattern}" if "G" in pattern else variant
        raise FlagError(
            f"gated delta nets ({layers}) cannot be used with {flags(dense[0])}: Megatron does not "
            "describe how their fused projections are sharded, which checkpoints need"
        )
    predicts = args.mtp_num_layers and not getattr(args, "mtp_hybrid_override_pattern", None)
    copies = pipeline > 1 and args.untie_embeddings_and_output_weights
    if predicts and copies and pattern and "/" not in pattern:
        raise FlagError(
            f"--mtp-num-layers {args.mtp_num_layers} cannot be used with --hybrid-layer-pattern "
            f"{pattern}, which has no layers for it: Megatron would add the gradients of the "
            "embedding and of the output layer, as if the last pipeline stage had an embedding; "
            f"omit --mtp-num-layers, or append the layers ({pattern}/M)"
        )
    if expert == 1:
        return
    if not args.num_experts:
        raise FlagError(f"{flags(experts[0])} needs --num-experts")
    if args.num_experts % expert:
        raise FlagError(f"{flags('num_experts')} cannot be divided by {flags(experts[0])}")


_SET_BY_MEGATRON = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Model options that Megatron sets itself if they are not given."""


def reject_model_options(config: Any) -> None:
    """Reject unsupported model options by name, for scripts without Megatron's command line.

    Args:
        config: Megatron's `TransformerConfig`.

    Raises:
        FlagError: The value of a field is not supported.
    """
    _check_overlapping_experts(config)
    _check_repeated_layers(config)
    reject(config, ignored=_SET_BY_MEGATRON)


@contextlib.contextmanager
def accepted_by_megatron(args: Any) -> Iterator[None]:
    """Change arguments temporarily so that Megatron's validation accepts supported ones."""
    if not is_enabled(args):
        yield
        return
    # `temporary` has values for the validation only, `lasting` values that remain afterwards.
    temporary: dict[str, Any] = {"check_weight_hash_across_dp_replicas_interval": None}
    lasting: dict[str, Any] = {}
    chosen = getattr(args, "optimizer", None)
    if chosen in EMERGING:
        # Megatron's own wrapper does not support these optimizers, and Megatron disables its
        # distributed optimizer for them. The options it derives must be those of Adam.
        temporary["optimizer"] = "adam"
    if args.async_save:
        # Megatron disables asynchronous saves without a worker process. Here a thread writes, which
        # needs neither a worker nor a strategy.
        temporary["use_persistent_ckpt_worker"] = True
        lasting |= {"use_persistent_ckpt_worker": False, "async_strategy": "mcore"}
    if offloads(args):
        # Megatron's validation requires this flag with offload. Afterwards the flag must be off, or
        # Megatron's optimizer would not read the gradients of sharded parameters, `param.grad`.
        temporary["use_precision_aware_optimizer"] = True
        lasting["use_precision_aware_optimizer"] = False
    original = {name: getattr(args, name) for name in temporary}
    apply_main_grads_dtype(args)
    vars(args).update(temporary)
    try:
        yield
    finally:
        vars(args).update(original | lasting)
    if "optimizer" in temporary and args.rank == 0:
        sys.stdout.write(f"optimizer: {chosen}; Megatron's list of arguments shows adam for it\n")


def check_validated_arguments(args: Any) -> None:
    """Check the arguments of a sharded run after Megatron's validation.

    Raises:
        FlagError: Megatron has set an option to an unsupported value.
    """
    if not args.use_distributed_optimizer:
        raise FlagError(f"{API_FLAG} needs Megatron's distributed optimizer, which was turned off")
    check_has_fused_adam(args)


def check_no_yaml(args: Any, argv: Sequence[str]) -> None:
    """Check that a YAML file does not replace a command line that selects this package.

    With `--yaml-cfg` Megatron ignores all flags of the command line, including those of this
    package, and would silently use its own wrapper.

    Args:
        args: Arguments that Megatron read from the file.
        argv: The command line.

    Raises:
        FlagError: The file or the command line selects this package.
    """
    if API_FLAG in argv or is_enabled(args):
        raise FlagError(
            f"--yaml-cfg cannot be used with {API_FLAG}: Megatron then reads all arguments from "
            "the file and does not validate them; pass them on the command line"
        )


def supported_on_cpu(argv: Sequence[str]) -> tuple[str, ...]:
    """Return flags that Megatron supports only on a GPU and this package also on a CPU.

    Args:
        argv: The command line. If it does not select this package, the result is empty.
    """
    if API_FLAG not in argv:
        return ()
    if _OFFLOAD_FLAG not in argv:
        return ("--use-nccl-ub",)
    # Megatron requires --use-precision-aware-optimizer with offload.
    return ("--use-nccl-ub", _OFFLOAD_FLAG, "--use-precision-aware-optimizer")


def with_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `add_megatron_arguments` to also add the flags of this package."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(original(parser))

    return add_megatron_arguments


def without_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `validate_yaml` to reject a file if this package is selected."""

    def validate_yaml(args: Any, *rest: Any, **kwargs: Any) -> Any:
        check_no_yaml(args, sys.argv)
        return original(args, *rest, **kwargs)

    return validate_yaml
