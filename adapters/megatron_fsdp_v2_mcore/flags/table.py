"""The flags of this package, and what becomes of Megatron's with sharded parameters.

Most flags that are rejected read what Megatron's own wrappers attach to a model (`main_grad`,
gradient buckets, whole weights on every rank), which sharded parameters do not have.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2.layout.placement import STRATEGIES
from megatron_fsdp_v2_mcore.flags.errors import flag_of

__all__ = ["DDP_FIELDS", "EMERGING", "OTHER_FLAGS", "OWN_FLAGS", "Flag", "Handling"]

EMERGING = ("muon", "adaptive_muon", "lion")
"""Optimizers of Megatron's registry that step shards, beside Adam."""


class Handling(enum.Enum):
    """What becomes of a flag."""

    SUPPORTED = "supported"
    """It changes what this package does."""
    NO_OP = "no-op"
    """It asks for what this package does anyway, or tunes something it does not use."""
    REJECTED = "rejected"
    """A value that `Flag.rejects` names ends the start with an error."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line.

    Attributes:
        name: Field of `DistributedDataParallelConfig`, or attribute of Megatron's arguments.
        handling: What becomes of it.
        meaning: What it does here, or why it is rejected.
        rejects: Whether a value is rejected; only used with `Handling.REJECTED`.
        argument: Attribute of Megatron's arguments, if a field has another name.
        flag: What a user types; by default made of the name.
        option: Field of `Options` that takes the value; only of a flag of this package.
        value: Parser of the value, or its choices; None for a switch. Likewise.
        needs: Flags of Megatron, of which it needs one. Likewise.
    """

    name: str
    handling: Handling
    meaning: str
    rejects: Callable[[Any], bool] = bool
    argument: str | None = None
    flag: str = ""
    option: str = ""
    value: Callable[[str], Any] | tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", flag_of(self.name))


def _supported(name: str, meaning: str, flag: str = "") -> Flag:
    return Flag(name, Handling.SUPPORTED, meaning, flag=flag)


def _no_op(name: str, meaning: str, flag: str = "") -> Flag:
    return Flag(name, Handling.NO_OP, meaning, flag=flag)


def _rejected(name: str, meaning: str, **options: Any) -> Flag:
    return Flag(name, Handling.REJECTED, meaning, **options)


def _own(name: str, option: str, meaning: str, **options: Any) -> Flag:
    return Flag(name, Handling.SUPPORTED, meaning, option=option, **options)


def _is_given(value: Any) -> bool:
    return value is not None


_ONE_BUCKET = "a unit's gradients are one bucket; --fsdp-bucket-bytes has small units share one"
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
_WORKER = "a thread of each rank writes; there is no worker process"
_ACTIVATIONS = (
    "activations go to host memory as without it; gathered weights are parameters, which neither "
    "Megatron nor Transformer Engine moves there. cpu_offloading_weights is rejected"
)
_MOMENTS = (
    "with --use-precision-aware-optimizer: Adam keeps it in this dtype; checkpoints have the "
    "values in fp32 (bf16 as it is), and load into any (see [optimizers.md](optimizers.md))"
)

DDP_FIELDS: tuple[Flag, ...] = (
    _supported("data_parallel_sharding_strategy", "sharding_strategy of every unit"),
    _supported(
        "num_distributed_optimizer_instances",
        "more than one: an outer data-parallel axis between them, so that parameters are sharded "
        "within an instance",
    ),
    _supported(
        "outer_dp_sharding_strategy", "outer_dp_sharding_strategy: no_shard (HSDP) or optim (HFSDP)"
    ),
    _supported("overlap_grad_reduce", "enable_async_reduce_grad"),
    _supported("overlap_param_gather", "enable_unshard_prefetch"),
    _supported(
        "suggested_communication_unit_size",
        "half of it, as with Megatron-FSDP, is how many elements are gathered ahead at most "
        "(unshard_prefetch_bytes), but one unit always is; below 2 none is. Reductions under way "
        "are limited by --fsdp-max-live-grad-buffers",
    ),
    _supported(
        "grad_reduce_in_fp32",
        "grad_comm_dtype and main_grads_dtype, where the Megatron-FSDP dtype flags say 'auto': "
        "fp32 if set, the model's dtype if not",
        flag="--accumulate-allreduce-grads-in-fp32",
    ),
    _supported("megatron_fsdp_main_params_dtype", "main_params_dtype; 'auto': the model's dtype"),
    _supported(
        "megatron_fsdp_main_grads_dtype",
        "main_grads_dtype; 'auto': the dtype of the main weights, which the optimizer reads",
    ),
    _supported("megatron_fsdp_grad_comm_dtype", "grad_comm_dtype; 'auto': see grad_reduce_in_fp32"),
    _supported(
        "check_for_nan_in_grad",
        "unless given, reduced gradients are checked before the optimizer steps",
        flag="--no-check-for-nan-in-loss-and-grad",
    ),
    _no_op("use_megatron_fsdp", "selects this package, with its own flag"),
    _no_op("use_custom_fsdp", "Megatron's older name of the same", flag="--use-megatron-fsdp"),
    _no_op(
        "use_distributed_optimizer",
        "Megatron turns it on; the optimizer steps sharded main weights",
    ),
    _no_op(
        "average_in_collective",
        "collectives only add; the factor of the mean is applied once, to the reduced sum where it "
        "is stored in the main gradient (with fp16 its power of two already to the terms)",
        flag="--ddp-average-in-collective",
    ),
    _no_op(
        "gradient_reduce_div_fusion",
        "as --ddp-average-in-collective: there is no pass for the division alone",
        flag="--no-gradient-reduce-div-fusion",
    ),
    _no_op("bucket_size", _ONE_BUCKET, flag="--ddp-bucket-size"),
    _no_op("num_buckets", _ONE_BUCKET, flag="--ddp-num-buckets"),
    _no_op(
        "pad_buckets_for_high_nccl_busbw",
        "shards are of equal size; there are no buckets to pad",
        flag="--ddp-pad-buckets-for-high-nccl-busbw",
    ),
    _no_op(
        "align_param_gather",
        "gathers are issued by the units, the same in every pipeline stage",
        flag="--no-align-param-gather",
    ),
    _no_op(
        "fsdp_all_gather_in_start_param_sync",
        "the first gather is issued by the forward",
        flag="(set for CUDA graphs)",
    ),
    _supported(
        "nccl_ub",
        "with --fsdp-trace-pool, its memory is NCCL's and registered with the data-parallel "
        "process groups, block by block when it is planned; without, addresses change, and a "
        "notice says that nothing is registered",
        flag="--use-nccl-ub",
    ),
    _no_op("fsdp_manual_registration", "memory is registered when it is planned, once"),
    _no_op(
        "disable_symmetric_registration",
        "ranks register for themselves: windows would have to be made by all at one moment, and "
        "gradients may be planned at different ones",
    ),
    _no_op(
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "only means something with Megatron's own double buffers",
    ),
    _no_op(
        "fsdp_double_buffer",
        "the number of units that are gathered or have full gradient buffers is bounded without "
        "it, and --fsdp-trace-pool keeps their memory between steps at fixed addresses; a notice "
        "says so",
    ),
    _no_op(
        "megatron_fsdp_max_pool_double_buffer", "as --fsdp-double-buffer; units may be of any sizes"
    ),
    _no_op(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "Megatron turns it off together with --use-megatron-fsdp",
    ),
    _rejected("check_for_large_grads", "its check reads Megatron's gradient buckets"),
    _supported(
        "reduce_scatter_with_fp32_accumulation",
        "gradients that travel in bf16 or fp16 are reduce-scattered by an all-to-all and a sum in "
        "fp32; all-reduces between optimizer instances stay in the communication dtype, as with "
        "Megatron. Rejected with no_shard, which scatters nothing",
        flag="--ddp-reduce-scatter-with-fp32-accumulation",
    ),
    _rejected(
        "param_name_patterns_for_fp32_local_accumulation",
        "use --megatron-fsdp-main-grads-dtype fp32 for all parameters instead",
        argument="ddp_param_name_patterns_for_fp32_local_accumulation",
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
    ),
    _supported(
        "fp8_param_gather",
        "weights are quantized from fp32 main weights once a step, each rank its rows with the "
        "scales of whole weights, and gathered as bytes",
    ),
    _supported("fp4_param_gather", "as --fp8-param-gather, with two elements to a byte"),
    _supported(
        "keep_fp8_transpose_cache",
        "with sharded weights, quantized and transposed copies outlive the gathered weights that "
        "they are made of: a whole copy in FP8 on every rank; without, they are made again",
    ),
    _supported(
        "delay_wgrad_compute",
        "with --overlap-moe-expert-parallel-comm, which it needs: a unit is reduced after the "
        "gradients of its weights that are made late",
    ),
    _supported(
        "megatron_fsdp_use_decoupled_grad",
        "--exp-avg-dtype, --exp-avg-sq-dtype and --main-grads-dtype take effect, see "
        "[optimizers.md](optimizers.md); param.decoupled_grad is another name of param.grad, "
        "which may be of another dtype than the weight anyway. With --optimizer-cpu-offload the "
        "flag changes nothing",
        flag="--use-precision-aware-optimizer",
    ),
    _rejected(
        "megatron_fsdp_cuda_graph_mode",
        "gathers are issued from the host",
        flag="--cuda-graph-impl",
    ),
    _rejected("megatron_fsdp_enable_fine_grained_param_gather", "a unit is gathered as a whole"),
)
"""Every field of `DistributedDataParallelConfig`; a test fails when Megatron adds one."""

OTHER_FLAGS: tuple[Flag, ...] = (
    _rejected(
        "cuda_graph_impl",
        "gathers are issued from the host",
        rejects=lambda value: value not in (None, "none"),
    ),
    _rejected(
        "optimizer",
        "adam, muon, adaptive_muon and lion can step shards; sgd cannot, as Megatron's distributed "
        "optimizer keeps no state of it; soap cannot, as its preconditioners are factors of whole "
        "matrices; instead of dist_muon, Megatron's deprecated name, use muon",
        rejects=lambda value: value not in (None, "adam", *EMERGING),
    ),
    _rejected("use_torch_fsdp2", "it selects PyTorch's wrapper instead"),
    _rejected(
        "freeze_all_layers",
        "Megatron turns off the distributed optimizer for it, and with nothing to train there is "
        "nothing to reduce",
    ),
    _rejected(
        "perform_rl_step", "it copies whole weights between a training and an inference model"
    ),
    _rejected(
        "moe_use_upcycling",
        "it copies whole weights from a dense model; upcycle without this package, then load",
    ),
    _rejected(
        "fake_process_group", "ranks compare what they sharded, and a fake group gives no answers"
    ),
    _rejected("save_wgrads_interval", _ONE_RANK, rejects=_is_given),
    _rejected("save_params_interval", _ONE_RANK, rejects=_is_given),
    _rejected(
        "dump_param_to_param_group_map",
        "Megatron writes it for its own wrapper only",
        rejects=_is_given,
    ),
    _rejected(
        "load_main_params_from_ckpt",
        "a checkpoint of sharded parameters holds main weights only; leave it out",
    ),
    _rejected(
        "qk_clip", "it changes attention weights head by head, of which a rank holds some rows"
    ),
    _rejected(
        "use_transformer_engine_op_fuser",
        "its fused experts ask for gradient buffers in the forward, where there are none",
    ),
    _rejected("defer_embedding_wgrad_compute", _LATE_GRADS),
    _rejected("overlap_dispatch_backward_with_experts_wgrad", _LATE_GRADS),
    _rejected(
        "overlap_param_gather_with_optimizer_step",
        "gathers are issued by the units, during the forward; use --overlap-param-gather",
    ),
    _rejected("enable_full_sharding_in_hsdp", "use --outer-dp-sharding-strategy optim instead"),
    _rejected("tensor_parallel_num_weight_shards", _GTP),
    _rejected("expert_tensor_parallel_num_weight_shards", _GTP),
    _rejected("hybrid_context_parallel", "Megatron does not offer it with --use-megatron-fsdp"),
    _rejected("enable_cuda_graph", _GRAPHS),
    _rejected("external_cuda_graph", _GRAPHS),
    _rejected(
        "optimizer_cuda_graph", "a replayed step tells no unit that its weights have changed"
    ),
    _rejected("te_precision_config_file", _QUANTIZED, rejects=_is_given),
    _rejected("moe_single_grouped_weight", _GROUPED),
    _rejected("moe_single_grouped_bias", _GROUPED),
    _rejected("non_persistent_ckpt_type", _READ_BACK, rejects=_is_given),
    _rejected("non_persistent_save_interval", _READ_BACK, rejects=_is_given),
    _rejected(
        "pretrained_checkpoint",
        "Megatron looks for the contents of an fsdp_dtensor checkpoint in --load; name it there, "
        "with --finetune",
        rejects=_is_given,
    ),
    _rejected(
        "verify_integrity", "Megatron hashes the files of torch_dist checkpoints only; leave it out"
    ),
    _rejected(
        "ckpt_convert_format",
        "Megatron would write sharded parameters in a format of whole ones",
        rejects=_is_given,
    ),
    _supported(
        "create_all_gather_group",
        "weights of dense and of expert parameters are gathered in process groups of their own, of "
        "the ranks that they are sharded over (Megatron 0.19's pretraining makes none)",
    ),
    _no_op(
        "moe_shared_expert_overlap",
        "gradients that arrive on the shared expert's stream are waited for before their layer is "
        "reduced",
    ),
    _supported(
        "overlap_moe_expert_parallel_comm",
        "layers and their experts are gathered for the parts that Megatron's schedule runs, and "
        "reduced when it is done with a micro-batch's backward of them; the root stays gathered, "
        "and a layer without experts from its attention to its MLP, beside what the other "
        "micro-batch uses. Not with --moe-latent-size",
    ),
    _supported(
        "async_save",
        "checkpoints are written by a thread of each rank, beside where they are to be, and put "
        "there when all ranks are done; training waits for a copy to host memory",
    ),
    _no_op(
        "use_persistent_ckpt_worker",
        f"{_WORKER}; without it, Megatron alone would turn --async-save off",
    ),
    _no_op("async_strategy", _WORKER),
    _no_op(
        "async_ckpt_cpu_priority",
        f"{_WORKER}; it is the priority of removing old checkpoints (--save-retain-interval) only",
    ),
    _no_op(
        "async_ckpt_io_priority",
        f"{_WORKER}; it is the priority of removing old checkpoints (--save-retain-interval) only",
    ),
    _no_op(
        "async_ckpt_use_cpu_shm",
        "values are copied to host memory by the training process in any case",
    ),
    _no_op("dist_ckpt_workers", "a rank writes one file"),
    _no_op("ckpt_assume_constant_structure", "every save is planned again"),
    _supported(
        "check_weight_hash_across_dp_replicas_interval",
        "with any strategy: units are gathered one after the other, and what ranks compute with is "
        "compared, as are copies of main weights (no_shard, optimizer instances); an error names "
        "parameters and ranks",
    ),
    _supported(
        "main_grads_dtype",
        "with --use-precision-aware-optimizer: as --megatron-fsdp-main-grads-dtype, which Megatron "
        "alone would have to be given too",
    ),
    _no_op(
        "main_params_dtype",
        "the optimizer makes no main weights beside the sharded parameters; anything but fp32 is "
        "rejected, and --megatron-fsdp-main-params-dtype says their dtype",
    ),
    _supported("exp_avg_dtype", f"{_MOMENTS}; fp16 and fp8 with a scale"),
    _supported("exp_avg_sq_dtype", f"{_MOMENTS}; as --exp-avg-dtype"),
    _supported(
        "optimizer_cpu_offload",
        "Adam's state of this rank's rows is in host memory, and torch's Adam steps them there "
        "(see [offload.md](offload.md)). Of --optimizer muon its Adam part is. Not with lion",
    ),
    _supported(
        "optimizer_offload_fraction",
        "of each rank's elements at least this fraction is offloaded, by whole parameters; less "
        "than one of them beyond it",
    ),
    _supported(
        "overlap_cpu_optimizer_d2h_h2d",
        "a parameter's rows are copied while those of others are stepped",
    ),
    _supported(
        "pin_cpu_grads", "copies of gradients are in pageable memory", flag="--no-pin-cpu-grads"
    ),
    _supported(
        "pin_cpu_params",
        "copies of parameters are in pageable memory (Megatron 0.19 alone pins them all the same)",
        flag="--no-pin-cpu-params",
    ),
    _supported(
        "use_torch_optimizer_for_cpu_offload",
        "what stays on the device is stepped by torch's Adam too (Megatron 0.19 alone never reads "
        "the flag)",
    ),
    _no_op("cpu_offloading_num_layers", _ACTIVATIONS),
    _no_op("fine_grained_activation_offloading", _ACTIVATIONS),
)
"""Flags of other parts of Megatron that are rejected or have a meaning of their own here."""


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
    _own(
        "expert_data_parallel_sharding_strategy",
        "expert_strategy",
        "Sharding strategy of the parameters of experts; default: that of all others, "
        "--data-parallel-sharding-strategy.",
        value=tuple(STRATEGIES),
    ),
    _own(
        "fsdp_trace_pool",
        "uses_trace_pool",
        "Put gathered weights and gradient buffers at planned addresses of one block of "
        "memory, after the first iterations have shown when each of them lives.",
    ),
    _own(
        "fsdp_unshard_prefetch_depth",
        "unshard_prefetch_depth",
        "Units gathered ahead of the one at work; default 1, or any number where bytes limit "
        "it. Each costs the gathered weights of one more unit. Needs --overlap-param-gather.",
        value=at_least_one,
        needs=("overlap_param_gather",),
    ),
    _own(
        "fsdp_unshard_prefetch_bytes",
        "unshard_prefetch_bytes",
        "Bytes of gathered weights that units gathered ahead take together at most, such as "
        "2GiB; the next unit is gathered ahead whatever it takes. Default: what "
        "--suggested-communication-unit-size says, or no limit of bytes. Needs "
        "--overlap-param-gather.",
        value=size,
        needs=("overlap_param_gather",),
    ),
    _own(
        "fsdp_unshard_after_step",
        "unshard_after_step",
        "Have the optimizer's step gather what the next forward begins with, so that what the "
        "host does until then overlaps these gathers. Holds their gathered weights meanwhile. "
        "Needs --overlap-param-gather.",
        needs=("overlap_param_gather",),
    ),
    _own(
        "fsdp_max_live_grad_buffers",
        "max_live_grad_buffers",
        "Units that have full gradient buffers at a time; default 2. Each costs one more "
        "buffer. Needs --overlap-grad-reduce.",
        value=at_least_one,
        needs=("overlap_grad_reduce",),
    ),
    _own(
        "fsdp_bucket_bytes",
        "bucket_bytes",
        "Units smaller than this share collectives: those that follow each other are gathered "
        "in one, and reduced in one, up to so many bytes, such as 4MiB. Default: a collective for "
        "every unit. Needs --overlap-param-gather or --overlap-grad-reduce.",
        value=size,
        needs=("overlap_param_gather", "overlap_grad_reduce"),
    ),
    _own(
        "fsdp_flat_optimizer",
        "steps_flat_tensors",
        "Have Adam step a few flat tensors instead of every parameter: the rows of a unit, "
        "which are next to each other in memory. Results and checkpoints are the same. Needs "
        "--optimizer adam, on the device and with state in fp32.",
    ),
    _own(
        "log_per_param_norm",
        "logs_parameter_norms",
        "Log the norm of every weight and gradient (before clipping) at every --log-interval: "
        "to TensorBoard and Weights & Biases where they are on, and on rank 0.",
    ),
)
"""Flags of this package."""
