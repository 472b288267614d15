"""The flags of this package, and the flags of Megatron that cannot be used with it.

Most of the rejected flags read attributes that Megatron's own wrappers add to a model (`main_grad`,
gradient buckets, whole weights on every rank). Sharded parameters do not have them.
`docs/megatron_flags.md` documents all other flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2.layout.placement import STRATEGIES
from megatron_fsdp_v2_mcore.flags.errors import flag_of

EMERGING = ("muon", "adaptive_muon", "lion")
"""Optimizers of Megatron's registry, apart from Adam, that support sharded parameters."""

NO_FLAG = "no command-line flag"
"""Used in place of a flag for fields that only a script can set."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line.

    Attributes:
        name: Attribute of Megatron's arguments, or field of its configuration objects.
        meaning: What a flag of this package does, or why one of Megatron is rejected.
        rejects: Whether a value is rejected.
        argument: Attribute of Megatron's arguments, if a field has another name.
        flag: The flag on the command line; by default derived from `name`.
        option: Only for flags of this package: the field of `Options` that takes the value.
        value: Only for flags of this package: a parser of the value, or its choices; None for a
            switch.
        needs: Only for flags of this package: the field of a flag of Megatron that must be given.
    """

    name: str
    meaning: str
    rejects: Callable[[Any], bool] = bool
    argument: str | None = None
    flag: str = ""
    option: str = ""
    value: Callable[[str], Any] | tuple[str, ...] | None = None
    needs: str = ""

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", flag_of(self.name))


def _is_given(value: Any) -> bool:
    return value is not None


_ONE_RANK = "it saves the local values of one rank, which are only some rows of each parameter"
_GRAPHS = "gathers are issued from the host"
_LATE_GRADS = (
    "it computes weight gradients after the backward of their layer, at the end of which gradients "
    "are reduced"
)
_QUANTIZED = "it may quantize weights in formats without a weight format; use --fp8-recipe"
_GTP = "weights are sharded over data-parallel ranks already; leave it out"
_GROUPED = "experts stacked in Transformer Engine's GroupedTensor cannot be sharded by rows"

REJECTED: tuple[Flag, ...] = (
    Flag("check_for_large_grads", "its check reads Megatron's gradient buckets"),
    Flag(
        "param_name_patterns_for_fp32_local_accumulation",
        "use --megatron-fsdp-main-grads-dtype fp32 for all parameters instead",
        argument="ddp_param_name_patterns_for_fp32_local_accumulation",
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
    ),
    Flag("megatron_fsdp_cuda_graph_mode", _GRAPHS, flag="--cuda-graph-impl"),
    Flag("megatron_fsdp_enable_fine_grained_param_gather", "a unit is gathered as a whole"),
    Flag("cuda_graph_impl", _GRAPHS, rejects=lambda value: value not in (None, "none")),
    Flag(
        "optimizer",
        "adam, muon, adaptive_muon and lion support sharded parameters; sgd does not, since "
        "Megatron's distributed optimizer does not support its state; soap does not, since its "
        "preconditioners are factors of whole matrices; use muon in place of dist_muon, "
        "Megatron's deprecated name",
        rejects=lambda value: value not in (None, "adam", *EMERGING),
    ),
    Flag("use_torch_fsdp2", "it selects PyTorch's wrapper instead"),
    Flag(
        "freeze_all_layers",
        "Megatron disables the distributed optimizer for it, and without trained parameters no "
        "gradients are reduced",
    ),
    Flag("perform_rl_step", "it copies whole weights between a training and an inference model"),
    Flag(
        "moe_use_upcycling",
        "it copies whole weights from a dense model; upcycle without this package, then load",
    ),
    Flag(
        "fake_process_group",
        "ranks compare their sharding, and a fake group does not communicate",
    ),
    Flag("save_wgrads_interval", _ONE_RANK, rejects=_is_given),
    Flag("save_params_interval", _ONE_RANK, rejects=_is_given),
    Flag(
        "dump_param_to_param_group_map",
        "Megatron writes it for its own wrapper only",
        rejects=_is_given,
    ),
    Flag(
        "load_main_params_from_ckpt",
        "a checkpoint of sharded parameters contains main weights only; leave it out",
    ),
    Flag("qk_clip", "it scales attention weights per head, and a rank holds only some rows"),
    Flag(
        "use_transformer_engine_op_fuser",
        "its fused experts read gradient buffers in the forward, when they do not exist",
    ),
    Flag("defer_embedding_wgrad_compute", _LATE_GRADS),
    Flag("overlap_dispatch_backward_with_experts_wgrad", _LATE_GRADS),
    Flag(
        "overlap_param_gather_with_optimizer_step",
        "gathers are issued by the units, during the forward; use --overlap-param-gather",
    ),
    Flag("enable_full_sharding_in_hsdp", "use --outer-dp-sharding-strategy optim instead"),
    Flag("tensor_parallel_num_weight_shards", _GTP),
    Flag("expert_tensor_parallel_num_weight_shards", _GTP),
    Flag("hybrid_context_parallel", "Megatron does not support it with --use-megatron-fsdp"),
    Flag("enable_cuda_graph", _GRAPHS),
    Flag("external_cuda_graph", _GRAPHS),
    Flag("optimizer_cuda_graph", "a replayed step does not mark weights as changed"),
    Flag("te_precision_config_file", _QUANTIZED, rejects=_is_given),
    Flag("moe_single_grouped_weight", _GROUPED),
    Flag("moe_single_grouped_bias", _GROUPED),
    Flag(
        "non_persistent_ckpt_type",
        "Megatron cannot read a non-persistent checkpoint of all ranks back in the fsdp_dtensor "
        "format; use local",
        rejects=lambda value: value not in (None, "local"),
    ),
    Flag(
        "verify_integrity", "Megatron hashes the files of torch_dist checkpoints only; leave it out"
    ),
    Flag(
        "ckpt_convert_format",
        "Megatron would write sharded parameters in a format of unsharded ones",
        rejects=_is_given,
    ),
    Flag(
        "cpu_offloading_weights",
        "gathered weights have no memory between forward and backward that could be offloaded; "
        "cpu_offloading of activations alone is supported",
        flag=NO_FLAG,
    ),
)
"""Flags that are an error at startup. A test fails if Megatron adds an unknown field."""


def rejected_by(source: Any) -> Iterator[tuple[Flag, Any]]:
    """Yield the rejected flags that are given, each with its value.

    Args:
        source: Megatron's arguments, or one of the configuration objects built from them. Flags
            without a field in it are skipped.
    """
    for flag in REJECTED:
        for name in (flag.argument, flag.name):
            if name and hasattr(source, name):
                value = getattr(source, name)
                if flag.rejects(value):
                    yield flag, value
                break


def at_least_one(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """Parse a number of bytes such as 2GiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


OWN_FLAGS: tuple[Flag, ...] = (
    Flag(
        "expert_data_parallel_sharding_strategy",
        "Sharding strategy of expert parameters; default: --data-parallel-sharding-strategy.",
        value=tuple(STRATEGIES),
        option="expert_strategy",
    ),
    Flag(
        "fsdp_unit_bytes",
        "Consecutive layers form one unit, which takes one collective for all of them, of up to "
        "this many bytes of parameters, such as 32MiB; a larger layer is a unit of its own, and "
        "with 1 every layer is. Default: --suggested-communication-unit-size, or 16MiB.",
        value=size,
        option="unit_bytes",
    ),
    Flag(
        "fsdp_trace_pool",
        "Place gathered weights and gradient buffers at planned addresses of one block of "
        "memory, after the first iterations have traced their lifetimes.",
        option="enable_trace_pool",
    ),
    Flag(
        "fsdp_unshard_prefetch_depth",
        "Number of units to prefetch; default 1, or unlimited if a number of bytes limits the "
        "prefetch. Each prefetched unit needs memory for its gathered weights. Needs "
        "--overlap-param-gather.",
        value=at_least_one,
        needs="overlap_param_gather",
        option="unshard_prefetch_depth",
    ),
    Flag(
        "fsdp_unshard_prefetch_bytes",
        "Maximum bytes of the gathered weights of prefetched units, such as 2GiB; the next unit "
        "is prefetched regardless of its size. Default: --suggested-communication-unit-size, or "
        "no limit. Needs --overlap-param-gather.",
        value=size,
        needs="overlap_param_gather",
        option="unshard_prefetch_bytes",
    ),
    Flag(
        "fsdp_max_live_grad_buffers",
        "Maximum number of units with full gradient buffers at a time; default 2. Each needs "
        "memory for its buffer. Needs --overlap-grad-reduce.",
        value=at_least_one,
        needs="overlap_grad_reduce",
        option="max_live_grad_buffers",
    ),
    Flag(
        "no_fsdp_flat_optimizer",
        "Step each parameter separately with Adam. By default Adam steps a few flat tensors, each "
        "with the contiguous rows of a unit, unless it is offloaded or has state in another dtype "
        "than fp32. Results and checkpoints are the same.",
        option="steps_each_parameter",
    ),
    Flag(
        "log_per_param_norm",
        "Log the norm of every weight and gradient (before clipping) at every --log-interval, "
        "to TensorBoard and Weights & Biases if they are enabled, and to rank 0's output.",
        option="logs_parameter_norms",
    ),
    Flag(
        "fsdp_save_differing_replicas",
        "Save, with a warning, although the replicas of a parameter differ between tensor-parallel "
        "ranks or pipeline stages: the checkpoint has the values of the first rank. Without "
        "--sequence-parallel, Megatron trains latent attention so.",
        option="saves_differing_replicas",
    ),
    Flag(
        "fsdp_trust_checkpoint",
        "Unpickle objects of --load that are not plain data, as Megatron does: they can run any "
        "code. Without the flag such a checkpoint is an error.",
        option="trusts_checkpoint",
    ),
    Flag(
        "fsdp_exit_on_failed_save",
        "End the training if a checkpoint cannot be saved. By default the failure is reported on "
        "every rank, training continues, and the next save is tried at the next interval; a "
        "training whose last save fails ends with an error.",
        option="exits_on_failed_save",
    ),
    Flag(
        "fsdp_hang_reports",
        "Folder into which every rank writes its latest collectives by unit; and where it is, when "
        "a collective fails, when none was issued for five minutes, and on SIGUSR1. "
        "megatron-fsdp-v2 hang FOLDER says which rank differs.",
        value=str,
        option="hang_reports",
    ),
    Flag(
        "fsdp_audit",
        "Compare model weights with main weights, replicas with each other, and gathered weights "
        "with those of their owners, before the first step and every N steps; and main weights and "
        "optimizer states with their checksums after the step before. What differs ends the "
        "training with an error that names ranks and parameters.",
        value=at_least_one,
        option="audit",
    ),
)
"""Flags of this package."""
