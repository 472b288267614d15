"""Does a checkpoint hold the model that is to be loaded? Asked before a value is read.

Torch and Megatron load what they find and leave the rest as it is. Weights that keep their initial
values, or layers nobody asks for, show much later and as nothing but a worse loss.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.folder import coverage_problems
from megatron_fsdp_v2_mcore.checkpoint.fp8_names import is_fp8_state, is_history
from megatron_fsdp_v2_mcore.flags.checkpoint_check import read_metadata
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = ["Verdict", "compare_with_file", "judge"]

Shape = tuple[int, ...] | None
"""Of a tensor; None for everything else."""

_SHOWN = 6

_STATE = "optimizer.state."
_RNG = "rng_state."
_SCALER = "optimizer.grad_scaler."

# What must agree between the run that saved and the one that loads, with the flag that says it.
_OF_THE_MODEL = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "max_position_embeddings": "--max-position-embeddings",
    "position_embedding_type": "--position-embedding-type",
    "num_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "mtp_num_layers": "--mtp-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "swiglu": "--swiglu",
    "normalization": "--normalization",
    "qk_layernorm": "--qk-layernorm",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "transformer_impl": "--transformer-impl",
}


@dataclass(slots=True)
class Verdict:
    """What of a request a file can answer.

    Attributes:
        problem: Why the file cannot be loaded; empty where it can.
        notes: Sentences to print.
        loads_rng: Whether every rank finds a state of its random number generators.
        loads_grad_scaler: Whether the file has the state of the loss scale.
        without_state: Optimizer entries of parameters that were saved before their first step.
        without_scales: Entries of FP8's delayed scaling that start anew.
    """

    problem: str = ""
    notes: list[str] = field(default_factory=list)
    loads_rng: bool = True
    loads_grad_scaler: bool = True
    without_state: set[str] = field(default_factory=set)
    without_scales: set[str] = field(default_factory=set)


def compare_with_file(path: str, request: dict[str, Any], saved_args: Any, args: Any) -> Verdict:
    """Compare what all ranks ask for with what a checkpoint holds. Collective.

    Args:
        path: The folder of the checkpoint.
        request: A nested state dict: what this rank asks for.
        saved_args: Megatron's arguments of the run that saved.
        args: Those of this run.

    Raises:
        FlagError: It is of another model; on all ranks, with the same message.
    """
    flat, _ = flatten_state_dict(request)
    asked = {
        key: tuple(value.shape) if hasattr(value, "shape") else None for key, value in flat.items()
    }
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(asked, gathered)
    answer: list[Any] = [None]
    if gathered is not None:
        everything = {key: shape for rank in gathered for key, shape in rank.items()}
        answer[0] = judge(path, everything, saved_args, args)
    dist.broadcast_object_list(answer)
    verdict: Verdict = answer[0]
    if verdict.problem:
        raise FlagError(verdict.problem)
    return verdict


def judge(path: str, asked: dict[str, Shape], saved_args: Any, args: Any) -> Verdict:
    """What of a request a file can answer.

    Args:
        path: The folder of the checkpoint.
        asked: What all ranks together ask for, with the shapes of tensors.
        saved_args: Megatron's arguments of the run that saved.
        args: Those of this run.
    """
    metadata = read_metadata(Path(path)).state_dict_metadata
    verdict = Verdict()
    scales = {key: shape for key, shape in asked.items() if is_fp8_state(key)}
    verdict.notes += _scales(path, scales, metadata, verdict.without_scales)
    # No run is of another model because of what it quantizes with.
    metadata = {
        k: entry
        for k, entry in metadata.items()
        if not is_fp8_state(k) or (k in scales and k not in verdict.without_scales)
    }
    asked = {k: shape for k, shape in asked.items() if k not in verdict.without_scales}
    there: dict[str, Shape] = {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.items()
    }
    if not any(key.startswith("optimizer.") for key in there) and any(
        key.startswith("optimizer.") for key in asked
    ):
        verdict.problem = (
            f"{path} holds no optimizer state; add --no-load-optim to start with a fresh optimizer"
        )
        return verdict
    if any(key.startswith(_RNG) and key not in there for key in asked):
        verdict.loads_rng = False
        verdict.notes.append(
            f"{path} holds no random number state for all (pipeline, tensor) ranks of this run: "
            "generators keep the seeds that this run started with"
        )
    if any(key.startswith(_SCALER) and key not in there for key in asked):
        verdict.loads_grad_scaler = False
        verdict.notes.append(f"{path} holds no loss scale: it starts from its initial value")
    verdict.without_state = _without_state(asked, there)
    verdict.problem = _gaps(path, asked, metadata) or _problem(
        path, asked, there, verdict, saved_args, args
    )
    return verdict


def _scales(
    path: str, asked: dict[str, Shape], metadata: dict[str, Any], left_out: set[str]
) -> list[str]:
    """Find out which entries of FP8's delayed scaling a file cannot answer, and say why."""
    missing, shorter, other = [], [], []
    for key, shape in asked.items():
        entry = metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            missing.append(key)
        elif tuple(entry.size) != shape or entry.properties.dtype != torch.float32:
            saved = tuple(entry.size)
            is_other_length = is_history(key) and shape is not None and saved[1:] == shape[1:]
            if is_other_length and len(saved) == 2 and entry.properties.dtype == torch.float32:
                shorter.append(f"{saved[0]} steps, and {shape[0]} here" if shape else "")
            else:
                other.append(f"{key} {saved} of {entry.properties.dtype}, here {shape}")
        else:
            continue
        left_out.add(key)
    anew = "what FP8 is quantized with starts anew"
    if missing and len(missing) == len(asked):
        return [f"{path} holds no scales of delayed scaling: {anew}"]
    notes = []
    if missing:
        notes.append(f"{path} holds no {listed(sorted(missing), _SHOWN)}: {anew} there")
    if shorter:
        notes.append(
            f"amax histories in {path} have {listed(sorted(set(shorter)), _SHOWN)} "
            "(--fp8-amax-history-len): they start anew, with the scales that were saved"
        )
    if other:
        shown = listed(sorted(other), _SHOWN)
        notes.append(f"{path} holds FP8 state of another shape: {shown}: {anew} there")
    return notes


def _without_state(asked: Collection[str], there: Collection[str]) -> set[str]:
    """Parameters whose optimizer state is asked for, and which had none when they were saved."""
    wanted, saved = (
        {_parameter(key) for key in keys if key.startswith(_STATE)} for keys in (asked, there)
    )
    return {name for name in wanted - saved if f"model.{name}" in there}


def _parameter(key: str) -> str:
    """Of an entry of the optimizer's state, which ends in the name of the state."""
    return key.removeprefix(_STATE).rpartition(".")[0]


def _gaps(path: str, asked: Collection[str], metadata: dict[str, Any]) -> str:
    """Which tensors a file has parts of only; empty if none. Torch leaves the rest as it is."""
    problems = [
        problem
        for key, entry in metadata.items()
        if key in asked and isinstance(entry, TensorStorageMetadata)
        for problem in coverage_problems(key, entry)
    ]
    return f"{path} is incomplete: {listed(sorted(problems), _SHOWN)}" if problems else ""


def _problem(
    path: str,
    asked: dict[str, Shape],
    there: dict[str, Shape],
    verdict: Verdict,
    saved_args: Any,
    args: Any,
) -> str:
    """Why the file is of another model; empty if it is of this one."""

    def may_be_missing(key: str) -> bool:
        if key.startswith(_RNG):
            return not verdict.loads_rng
        if key.startswith(_SCALER):
            return not verdict.loads_grad_scaler
        return key.startswith(_STATE) and _parameter(key) in verdict.without_state

    missing = [key for key in asked if key not in there and not may_be_missing(key)]
    unknown = [key for key in there if key.startswith("model.") and key not in asked]
    reshaped = {
        key: f"{key} {there[key]}, here {shape}"
        for key, shape in asked.items()
        if key in there and shape is not None and shape != there[key] and _is_shared(key)
    }
    found = []
    if missing:
        found.append(f"it does not hold {listed(sorted(missing), _SHOWN)}")
    if unknown:
        found.append(f"it holds what this model does not have: {listed(sorted(unknown), _SHOWN)}")
    if reshaped:
        found.append(f"shapes differ: {listed(sorted(reshaped.values()), _SHOWN)}")
    if not found:
        return ""
    hints = [
        *_optimizer(missing, saved_args, args),
        *_vocabulary(reshaped, saved_args, args),
        *_other_flags(saved_args, args),
    ]
    return ". ".join([f"{path} is a checkpoint of another model: {'; '.join(found)}", *hints])


def _is_shared(key: str) -> bool:
    """Whether a tensor is part of the model: others belong to a rank, and may be of any size."""
    return key.startswith(("model.", _STATE))


def _optimizer(missing: Collection[str], saved: Any, args: Any) -> list[str]:
    """What to do where another optimizer's state was saved."""
    mine, theirs = (getattr(a, "optimizer", None) for a in (args, saved))
    if mine == theirs or theirs is None or not any(key.startswith(_STATE) for key in missing):
        return []
    return [
        f"--optimizer was {theirs} and is {mine}: resume with --optimizer {theirs}, or add "
        f"--no-load-optim to start {mine} afresh"
    ]


def _vocabulary(reshaped: Collection[str], saved: Any, args: Any) -> list[str]:
    """How to pad the vocabulary alike, where that is what differs."""
    mine, theirs = (getattr(a, "padded_vocab_size", None) for a in (args, saved))
    embeds = any(
        key.endswith(("word_embeddings.weight", "output_layer.weight")) for key in reshaped
    )
    if not embeds or mine == theirs or theirs is None:
        return []
    size, was = args.tensor_model_parallel_size, saved.tensor_model_parallel_size
    divisor, rest = divmod(theirs, size)
    advice = f"--make-vocab-size-divisible-by {divisor}" if not rest else "another vocabulary"
    return [
        f"The vocabulary was padded to {theirs} at --tensor-model-parallel-size {was} and is "
        f"padded to {mine} at {size}: {advice} pads it as it was"
    ]


def _other_flags(saved: Any, args: Any) -> list[str]:
    """Which flags that shape a model were given in another way."""
    other = [
        f"{flag} ({attribute}) was {getattr(saved, attribute)} and is {getattr(args, attribute)}"
        for attribute, flag in _OF_THE_MODEL.items()
        if hasattr(saved, attribute)
        and hasattr(args, attribute)
        and getattr(saved, attribute) != getattr(args, attribute)
    ]
    return [f"Flags that differ: {', '.join(other)}"] if other else []
