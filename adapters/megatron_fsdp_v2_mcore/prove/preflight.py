"""What jobs on clusters get wrong, each with its remedy, from flags and environment alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_cpu_rehearsal.flags import IMPL_FLAG, LOCAL
from megatron_fsdp_v2_mcore.prove.shrink import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    PIPELINE,
    TENSOR,
    Flags,
    number,
)
from megatron_fsdp_v2_mcore.prove.sides import CHECKPOINT_FORMAT, FSDP

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
QK_SCALING, QK_VARIABLE = "--apply-query-key-layer-scaling", "NVTE_APPLY_QK_LAYER_SCALING"
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local", "/scratch/local")
_RANKS_OF_A_NODE = 8
_LONG_INTERVAL = 100


def preflight(flags: Flags, environment: Mapping[str, str], num_ranks: int | None) -> Iterator[str]:
    """Yield sentences about a job: what is wrong, and what to do.

    Args:
        flags: The user's flags.
        environment: Environment variables of the job.
        num_ranks: Ranks of the job, if known.
    """
    splits = number(flags, TENSOR) > 1 or number(flags, CONTEXT) > 1
    connections = environment.get(_CONNECTIONS)
    if FSDP in flags and connections == "1":
        beside = " beside tensor or context parallelism" if splits else ""
        yield (
            f"{_CONNECTIONS}=1 with {FSDP}{beside}: gathers and reductions would wait behind "
            "computation, and Megatron rejects it; unset it"
        )
    if FSDP not in flags and splits and connections != "1":
        yield (
            f"without {FSDP}, Megatron requires {_CONNECTIONS}=1 on GPUs before Blackwell; with "
            f"{FSDP} leave it unset"
        )
    checkpoints = flags.get(CHECKPOINT_FORMAT, ("torch_dist",))[0]
    if FSDP in flags and checkpoints != "fsdp_dtensor":
        yield (
            f"{CHECKPOINT_FORMAT} {checkpoints} with {FSDP}: add {CHECKPOINT_FORMAT} fsdp_dtensor; "
            "megatron-fsdp-v2 ckpt convert changes existing checkpoints"
        )
    is_local = flags.get(IMPL_FLAG) == (LOCAL,)
    if QK_SCALING in flags and not is_local and environment.get(QK_VARIABLE) != "1":
        yield f"{QK_SCALING} with Transformer Engine's layers: export {QK_VARIABLE}=1"
    yield from _faults_of_megatron(flags)
    yield from _allocator(flags, environment)
    yield from _folders(flags, num_ranks)
    if (
        "--no-check-for-nan-in-loss-and-grad" in flags
        and number(flags, "--log-interval", 100) >= _LONG_INTERVAL
    ):
        yield (
            "steps never wait for the GPU: without a check for NaN, the host runs ahead until the "
            "next log line, and a hang or a NaN is seen an interval later; set --log-interval 10 "
            "or leave out --no-check-for-nan-in-loss-and-grad"
        )
    if num_ranks is not None:
        yield from _sizes(flags, num_ranks)


def _faults_of_megatron(flags: Flags) -> Iterator[str]:
    """Yield what Megatron computes wrongly, with its own data parallelism too."""
    tensor, context = number(flags, TENSOR) > 1, number(flags, CONTEXT) > 1
    if context and "--calculate-per-token-loss" not in flags:
        yield (
            f"{CONTEXT} without --calculate-per-token-loss: if the loss of some tokens is masked "
            "(prompts, padding, --eod-mask-loss), Megatron averages the means of ranks with "
            "different numbers of other tokens; add --calculate-per-token-loss"
        )
    if context and "--mtp-num-layers" in flags:
        yield (
            f"{CONTEXT} with --mtp-num-layers: Megatron scales the loss of further tokens with the "
            "numbers of one rank's part; no flag prevents it"
        )
    if tensor and "--multi-latent-attention" in flags and "--sequence-parallel" not in flags:
        yield (
            f"{TENSOR} with --multi-latent-attention: Megatron does not sum all gradients of "
            "replicas, and tensor-parallel ranks train apart; add --sequence-parallel"
        )
    if tensor and flags.get("--softmax-type") == ("learnable",):
        yield (
            f"{TENSOR} with --softmax-type learnable: Megatron leaves the attention sinks of all "
            "tensor-parallel ranks but the first out of the gradient norm; no flag prevents it"
        )


def _allocator(flags: Flags, environment: Mapping[str, str]) -> Iterator[str]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = " ".join(environment.get(name, "") for name in names)
    expands = "expandable_segments:true" in settings.lower()
    if "--use-nccl-ub" in flags and expands:
        yield (
            f"--use-nccl-ub with {names[0]}=expandable_segments:True: NCCL cannot register memory "
            "that grows; leave one of them out"
        )
    elif "--use-nccl-ub" not in flags and FSDP in flags and not expands:
        yield (
            f"{names[0]} has no expandable_segments:True: gathered units of different sizes "
            "fragment the memory of a long run; set it, or use --fsdp-trace-pool"
        )


def _folders(flags: Flags, num_ranks: int | None) -> Iterator[str]:
    if num_ranks is not None and num_ranks <= _RANKS_OF_A_NODE:
        return
    for name in ("--save", "--load"):
        for folder in flags.get(name, ()):
            path = Path(folder)
            if any(path.is_relative_to(local) for local in _LOCAL_FOLDERS):
                yield (
                    f"{name} {folder} is a folder of one node, and every rank writes its part of a "
                    "checkpoint: name a folder that all nodes share"
                )


def _sizes(flags: Flags, num_ranks: int) -> Iterator[str]:
    tensor, pipeline = number(flags, TENSOR), number(flags, PIPELINE)
    model = tensor * pipeline * number(flags, CONTEXT)
    experts = pipeline * number(flags, EXPERT) * number(flags, EXPERT_TENSOR, tensor)
    if num_ranks % model:
        yield (
            f"{num_ranks} ranks are no multiple of tensor x pipeline x context = {model}: "
            "change a size"
        )
        return
    if "--num-experts" in flags and num_ranks % experts:
        yield (
            f"{num_ranks} ranks are no multiple of pipeline x expert x expert-tensor = {experts}: "
            "change a size"
        )
    micro = number(flags, "--micro-batch-size") * (num_ranks // model)
    batch = number(flags, "--global-batch-size", micro)
    if batch % micro:
        yield (
            f"--global-batch-size {batch} is no multiple of micro-batch size x data-parallel ranks "
            f"= {micro}: change a size"
        )
