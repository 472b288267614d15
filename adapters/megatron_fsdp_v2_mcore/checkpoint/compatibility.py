"""Compares a checkpoint with the model to be loaded, before any value is read.

torch and Megatron load the entries they find and leave all others unchanged. Weights that keep
their initial values, or layers of the file that are not loaded, would only cause a worse loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, coverage_problems
from megatron_fsdp_v2.checkpoint.manifest import Entry
from megatron_fsdp_v2_mcore.checkpoint.name_table import is_fp8_state, is_history
from megatron_fsdp_v2_mcore.flags.checkpoint_check import flag_errors
from megatron_fsdp_v2_mcore.flags.errors import FlagError

Shape = tuple[int, ...] | None
"""Shape of a tensor; None for other entries."""

_MAX_LISTED = 6

_MODEL = "model"
_STATE = "optimizer.state."
_ABSENT = object()

# Entries that keep the values of this run if a file lacks them, and the note on them.
_OPTIONAL = {
    ("rng_state",): (
        "has no random number state for all (pipeline, tensor) ranks of this run: generators keep "
        "the seeds of this run"
    ),
    ("optimizer", "grad_scaler"): "has no loss scale: it starts from its initial value",
}

# Arguments that an error about a checkpoint of another model lists if they differ between the runs.
_MODEL_ARGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "max_position_embeddings", "position_embedding_type", "num_experts"),
    *("moe_ffn_hidden_size", "moe_grouped_gemm", "mtp_num_layers", "hybrid_layer_pattern"),
    *("swiglu", "normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "transformer_impl"),
)


@dataclass(slots=True)
class Compatibility:
    """The result of comparing a request with a file.

    Attributes:
        problem: Reason why the file cannot be loaded; empty if it can.
        notes: Messages to print.
        absent: Nested keys of requested values that the file lacks and that keep the values of this
            run: random number state, the loss scale, the optimizer state of a parameter that was
            saved before its first step, and state of FP8's delayed scaling.
    """

    problem: str = ""
    notes: list[str] = field(default_factory=list)
    absent: set[tuple[str, ...]] = field(default_factory=set)


def compare_with_file(path: str, request: dict[str, Any], saved: Any, args: Any) -> Compatibility:
    """Compare the requests of all ranks with the entries of a checkpoint. Collective.

    Args:
        path: The folder of the checkpoint.
        request: The nested state dict that this rank requests.
        saved: Megatron's arguments of the run that saved.
        args: Megatron's arguments of this run.

    Raises:
        FlagError: The checkpoint is incomplete, of another model, or without optimizer state.
            Raised on all ranks with the same message.
    """
    flat, _ = flatten_state_dict(request)
    requested = {
        key: tuple(value.shape) if hasattr(value, "shape") else None for key, value in flat.items()
    }
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(requested, gathered)
    answer: list[Any] = [None]
    if gathered is not None:
        merged = {key: shape for rank in gathered for key, shape in rank.items()}
        answer[0] = check_request(path, merged, saved, args)
    dist.broadcast_object_list(answer)
    result: Compatibility = answer[0]
    if result.problem:
        raise FlagError(result.problem)
    return result


def check_request(path: str, requested: dict[str, Shape], saved: Any, args: Any) -> Compatibility:
    """Compare the merged request of all ranks with the entries of a checkpoint.

    Args:
        path: The folder of the checkpoint.
        requested: The requested entries of all ranks, with the shapes of tensors.
        saved: Megatron's arguments of the run that saved.
        args: Megatron's arguments of this run.
    """
    with flag_errors():
        entries = CheckpointFolder(path).entries
    result = Compatibility()
    scales = {key: shape for key, shape in requested.items() if is_fp8_state(key)}
    other_scales, notes = _unusable_scales(path, scales, entries)
    result.notes += notes
    result.absent |= {(_MODEL, key.removeprefix(f"{_MODEL}.")) for key in other_scales}
    requested = {key: shape for key, shape in requested.items() if key not in other_scales}
    # FP8 state does not decide whether the checkpoint is of the same model.
    entries = {k: v for k, v in entries.items() if not is_fp8_state(k) or k in requested}
    stored: dict[str, Shape] = {
        key: None if entry.dtype is None else entry.shape for key, entry in entries.items()
    }
    if not any(key.startswith("optimizer.") for key in stored) and any(
        key.startswith("optimizer.") for key in requested
    ):
        result.problem = (
            f"{path} has no optimizer state; add --no-load-optim to start with a new optimizer"
        )
        return result
    missing = _missing_entries(requested, stored, result.absent)
    result.notes += [f"{path} {note}" for keys, note in _OPTIONAL.items() if keys in result.absent]
    result.problem = _coverage_problem(path, requested, entries) or _model_problem(
        path, requested, stored, missing, saved, args
    )
    return result


def _unusable_scales(
    path: str, requested: dict[str, Shape], entries: Mapping[str, Entry]
) -> tuple[set[str], list[str]]:
    """Return the delayed-scaling entries that cannot be loaded from a file, and notes on them."""
    unusable: set[str] = set()
    missing, resized, mismatched = [], [], []
    for key, shape in requested.items():
        entry = entries.get(key)
        if entry is None or entry.dtype is None:
            missing.append(key)
        elif (entry.shape, entry.dtype) != (shape, torch.float32):
            saved, dtype = entry.shape, entry.dtype
            is_fp32_history = dtype == torch.float32 and len(saved) == 2 and is_history(key)
            if is_fp32_history and shape is not None and saved[1:] == shape[1:]:
                resized.append(f"{saved[0]} steps, {shape[0]} in this run")
            else:
                mismatched.append(f"{key} {saved} of {dtype}, in this run {shape}")
        else:
            continue
        unusable.add(key)
    reinitialized = "its FP8 state is reinitialized"
    if missing and len(missing) == len(requested):
        return unusable, [f"{path} has no scales of delayed scaling: {reinitialized}"]
    notes = []
    if missing:
        notes.append(f"{path} has no {listed(sorted(missing), _MAX_LISTED)}: {reinitialized}")
    if resized:
        notes.append(
            f"amax histories in {path} have {listed(sorted(set(resized)), _MAX_LISTED)} "
            "(--fp8-amax-history-len): they are reinitialized, and the saved scales are loaded"
        )
    if mismatched:
        shown = listed(sorted(mismatched), _MAX_LISTED)
        notes.append(f"{path} has FP8 state of another shape: {shown}: {reinitialized}")
    return unusable, notes


def _missing_entries(
    requested: Collection[str], stored: Collection[str], absent: set[tuple[str, ...]]
) -> list[str]:
    """Return the required entries that a file lacks; add missing optional entries to `absent`."""
    stepped = {_parameter_of_state(key) for key in stored if key.startswith(_STATE)}
    needed = []
    for key in requested:
        if key in stored:
            continue
        keys = next((keys for keys in _OPTIONAL if key.startswith(f"{'.'.join(keys)}.")), None)
        name = _parameter_of_state(key) if key.startswith(_STATE) else None
        if name is not None and name not in stepped and f"{_MODEL}.{name}" in stored:
            keys = ("optimizer", "state", name)
        if keys is None:
            needed.append(key)
        else:
            absent.add(keys)
    return needed


def _parameter_of_state(key: str) -> str:
    """Return the parameter in the key of optimizer state, whose last component names the state."""
    return key.removeprefix(_STATE).rpartition(".")[0]


def _coverage_problem(path: str, requested: Collection[str], entries: Mapping[str, Entry]) -> str:
    """Name tensors with missing elements in the file, which torch would load without an error."""
    problems = [
        problem
        for key, entry in entries.items()
        if key in requested and entry.dtype is not None
        for problem in coverage_problems(key, entry)
    ]
    return f"{path} is incomplete: {listed(sorted(problems), _MAX_LISTED)}" if problems else ""


def _model_problem(
    path: str,
    requested: dict[str, Shape],
    stored: dict[str, Shape],
    missing: list[str],
    saved: Any,
    args: Any,
) -> str:
    """Return the reason why the file is of another model; empty if it is of this model."""
    unknown = [key for key in stored if key.startswith(f"{_MODEL}.") and key not in requested]
    reshaped = {
        key: f"{key} {stored[key]}, in this run {shape}"
        for key, shape in requested.items()
        if key in stored and shape is not None and shape != stored[key] and _is_shared(key)
    }
    found = []
    if missing:
        found.append(f"it does not contain {listed(sorted(missing), _MAX_LISTED)}")
    if unknown:
        found.append(f"this model does not have its {listed(sorted(unknown), _MAX_LISTED)}")
    if reshaped:
        found.append(f"shapes differ: {listed(sorted(reshaped.values()), _MAX_LISTED)}")
    if not found:
        return ""
    hints = [
        *_optimizer_advice(missing, saved, args),
        *_vocabulary_advice(reshaped, saved, args),
        *_flag_differences(saved, args),
    ]
    return ". ".join([f"{path} is a checkpoint of another model: {'; '.join(found)}", *hints])


def _is_shared(key: str) -> bool:
    """Whether a tensor belongs to the model or optimizer. Rank-local tensors may have any size."""
    return key.startswith((f"{_MODEL}.", _STATE))


def _optimizer_advice(missing: Collection[str], saved: Any, args: Any) -> list[str]:
    """Return advice if the state of another optimizer was saved."""
    mine, theirs = (getattr(a, "optimizer", None) for a in (args, saved))
    if mine == theirs or theirs is None or not any(key.startswith(_STATE) for key in missing):
        return []
    return [
        f"--optimizer was {theirs} and is {mine}: resume with --optimizer {theirs}, or add "
        f"--no-load-optim to start with a new {mine}"
    ]


def _vocabulary_advice(reshaped: Collection[str], saved: Any, args: Any) -> list[str]:
    """Return advice on padding if the padded size of the vocabulary differs."""
    mine, theirs = (getattr(a, "padded_vocab_size", None) for a in (args, saved))
    has_vocabulary = any(
        key.endswith(("word_embeddings.weight", "output_layer.weight")) for key in reshaped
    )
    if not has_vocabulary or mine == theirs or theirs is None:
        return []
    size, was = args.tensor_model_parallel_size, saved.tensor_model_parallel_size
    divisor, rest = divmod(theirs, size)
    advice = f"--make-vocab-size-divisible-by {divisor}" if not rest else "another vocabulary"
    return [
        f"The vocabulary was padded to {theirs} at --tensor-model-parallel-size {was} and is "
        f"padded to {mine} at {size}: {advice} pads it to {theirs}"
    ]


def _flag_differences(saved: Any, args: Any) -> list[str]:
    """Return the model flags that differ between the runs."""
    differences = []
    for name in _MODEL_ARGS:
        was, now = _value(saved, name), _value(args, name)
        if was != now and _ABSENT not in (was, now):
            flag = name.replace("add_bias", "disable_bias").replace("_", "-")
            differences.append(f"--{flag} ({name}) was {was} and is {now}")
    return [f"Flags that differ: {', '.join(differences)}"] if differences else []


def _value(args: Any, name: str) -> Any:
    # Without the flag, Megatron sets the number of groups when it first logs, before a save.
    if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
        return args.num_attention_heads
    return getattr(args, name, _ABSENT)
