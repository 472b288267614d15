"""Flags of Megatron that do not configure sharding and mean something of their own with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OTHERS", "OtherFlag"]


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """A flag outside of `DistributedDataParallelConfig` that is accepted.

    Attributes:
        name: Attribute of Megatron's arguments.
        flag: What a user types.
        changes: Whether it changes what this package does.
        meaning: What it does here, or why it changes nothing.
    """

    name: str
    flag: str
    changes: bool
    meaning: str


_WORKER = "a thread of each rank writes; there is no worker process"

_ACTIVATIONS = (
    "activations go to host memory as without it; gathered weights are parameters, which neither "
    "Megatron nor Transformer Engine moves there. cpu_offloading_weights is rejected"
)
_MOMENTS = (
    "with --use-precision-aware-optimizer: Adam keeps it in this dtype; checkpoints have the "
    "values in fp32 (bf16 as it is), and load into any (see [optimizers.md](optimizers.md))"
)

OTHERS: tuple[OtherFlag, ...] = (
    OtherFlag(
        "create_all_gather_group",
        "--create-all-gather-group",
        True,
        "weights of dense and of expert parameters are gathered in process groups of their own, of "
        "the ranks that they are sharded over (Megatron 0.19's pretraining makes none)",
    ),
    OtherFlag(
        "moe_shared_expert_overlap",
        "--moe-shared-expert-overlap",
        False,
        "gradients that arrive on the shared expert's stream are waited for before their layer is "
        "reduced",
    ),
    OtherFlag(
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        True,
        "layers and their experts are gathered for the parts that Megatron's schedule runs, and "
        "reduced when it is done with a micro-batch's backward of them; the root stays gathered, "
        "and a layer without experts from its attention to its MLP, beside what the other "
        "micro-batch uses. Not with --moe-latent-size",
    ),
    OtherFlag(
        "async_save",
        "--async-save",
        True,
        "checkpoints are written by a thread of each rank, beside where they are to be, and put "
        "there when all ranks are done; training waits for a copy to host memory",
    ),
    OtherFlag(
        "use_persistent_ckpt_worker",
        "--use-persistent-ckpt-worker",
        False,
        f"{_WORKER}; without it, Megatron alone would turn --async-save off",
    ),
    OtherFlag("async_strategy", "--async-strategy", False, _WORKER),
    OtherFlag(
        "async_ckpt_cpu_priority",
        "--async-ckpt-cpu-priority",
        False,
        f"{_WORKER}; it is the priority of removing old checkpoints (--save-retain-interval) only",
    ),
    OtherFlag(
        "async_ckpt_io_priority",
        "--async-ckpt-io-priority",
        False,
        f"{_WORKER}; it is the priority of removing old checkpoints (--save-retain-interval) only",
    ),
    OtherFlag(
        "async_ckpt_use_cpu_shm",
        "--async-ckpt-use-cpu-shm",
        False,
        "values are copied to host memory by the training process in any case",
    ),
    OtherFlag("dist_ckpt_workers", "--dist-ckpt-workers", False, "a rank writes one file"),
    OtherFlag(
        "ckpt_assume_constant_structure",
        "--ckpt-assume-constant-structure",
        False,
        "every save is planned again",
    ),
    OtherFlag(
        "check_weight_hash_across_dp_replicas_interval",
        "--check-weight-hash-across-dp-replicas-interval",
        True,
        "with any strategy: units are gathered one after the other, and what ranks compute with is "
        "compared, as are copies of main weights (no_shard, optimizer instances); an error names "
        "parameters and ranks",
    ),
    OtherFlag(
        "main_grads_dtype",
        "--main-grads-dtype",
        True,
        "with --use-precision-aware-optimizer: as --megatron-fsdp-main-grads-dtype, which Megatron "
        "alone would have to be given too",
    ),
    OtherFlag(
        "main_params_dtype",
        "--main-params-dtype",
        False,
        "the optimizer makes no main weights beside the sharded parameters; anything but fp32 is "
        "rejected, and --megatron-fsdp-main-params-dtype says their dtype",
    ),
    OtherFlag("exp_avg_dtype", "--exp-avg-dtype", True, f"{_MOMENTS}; fp16 and fp8 with a scale"),
    OtherFlag("exp_avg_sq_dtype", "--exp-avg-sq-dtype", True, f"{_MOMENTS}; as --exp-avg-dtype"),
    OtherFlag(
        "optimizer_cpu_offload",
        "--optimizer-cpu-offload",
        True,
        "Adam's state of this rank's rows is in host memory, and torch's Adam steps them there "
        "(see [offload.md](offload.md)). Of --optimizer muon its Adam part is. Not with lion",
    ),
    OtherFlag(
        "optimizer_offload_fraction",
        "--optimizer-offload-fraction",
        True,
        "of each rank's elements at least this fraction is offloaded, by whole parameters; less "
        "than one of them beyond it",
    ),
    OtherFlag(
        "overlap_cpu_optimizer_d2h_h2d",
        "--overlap-cpu-optimizer-d2h-h2d",
        True,
        "a parameter's rows are copied while those of others are stepped",
    ),
    OtherFlag(
        "pin_cpu_grads",
        "--no-pin-cpu-grads",
        True,
        "copies of gradients are in pageable memory",
    ),
    OtherFlag(
        "pin_cpu_params",
        "--no-pin-cpu-params",
        True,
        "copies of parameters are in pageable memory (Megatron 0.19 alone pins them all the same)",
    ),
    OtherFlag(
        "use_torch_optimizer_for_cpu_offload",
        "--use-torch-optimizer-for-cpu-offload",
        True,
        "what stays on the device is stepped by torch's Adam too (Megatron 0.19 alone never reads "
        "the flag)",
    ),
    OtherFlag(
        "cpu_offloading_num_layers",
        "--cpu-offloading-num-layers",
        False,
        _ACTIVATIONS,
    ),
    OtherFlag(
        "fine_grained_activation_offloading",
        "--fine-grained-activation-offloading",
        False,
        _ACTIVATIONS,
    ),
)
"""Every one of them; they are listed in docs/megatron_flags.md."""
