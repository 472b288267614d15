"""Loading: at any world size, with any strategy, every rank reads what it holds and no more."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.agreement import together
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    MODEL,
    OPTIMIZER_GROUPS,
    OPTIMIZER_STATE,
    apply_groups,
    is_extra_state,
    model_entries,
    parameter_names,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, Wanted
from megatron_fsdp_v2.checkpoint.saving import INCOMPLETE, PREVIOUS
from megatron_fsdp_v2.uneven_dtensor import UnevenDTensor, local_of

__all__ = ["Comparison", "compare", "load"]

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the names and shapes of a checkpoint fit a model and its optimizer.

    Attributes:
        missing: What the model has and the checkpoint does not.
        unexpected: What the checkpoint has and the model does not.
        mismatched: Names of other shapes, each with a sentence.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.mismatched)

    @override
    def __str__(self) -> str:
        parts = [_list("missing in the checkpoint", self.missing)]
        parts.append(_list("not in the model", self.unexpected))
        parts.append(_list("of another shape", tuple(self.mismatched.values())))
        return "; ".join(part for part in parts if part) or "everything fits"


def compare(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Comparison:
    """Compare a checkpoint with a model by name and shape. Reads metadata only; no communication.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    return _compare(_open(path), model, optimizer)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Load what `save` saved, in place. Collective over all ranks.

    Names and shapes are compared before a value is read; every byte that is read is checked.
    Weights are active in the next forward, evaluation too.

    Args:
        path: The folder.
        model: Sharded in any way, at any world size; or not at all.
        optimizer: Of its parameters; options of groups are loaded too. State of parameters that
            had none is dropped.
        strict: Whether a name that only one side has is an error; otherwise it is a warning, and
            what both have is loaded. A shape that differs always is an error.

    Returns:
        What was given to `save` as `extra`.

    Raises:
        CheckpointError: There is no complete checkpoint, it is damaged, or of another model; raised
            on every rank when one of them finds it.
    """
    return together(f"load {path}", lambda: _load(path, model, optimizer, strict))


def _load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Any:
    folder = _open(path)
    difference = _compare(folder, model, optimizer)
    if difference.mismatched or (strict and not difference.fits):
        hint = "" if difference.mismatched else "; strict=False loads what both have"
        raise CheckpointError(f"{folder.path} is of another model: {difference}{hint}")
    if not difference.fits:
        _warn(f"{folder.path} fits in part: {difference}")
    wanted: list[Wanted] = []
    state_dict: dict[str, Any] = {}
    for key, value in model_entries(model).items():
        if not folder.has(key):
            continue
        if isinstance(value, torch.Tensor):
            wanted += _wanted(key, value)
        else:
            state_dict[key.removeprefix(MODEL)] = folder.object(key)
    states = {} if optimizer is None else _new_states(folder, model, optimizer, wanted)
    with torch.no_grad():
        _fill(folder, wanted)
    if state_dict:
        model.load_state_dict(state_dict, strict=False)
    for tensor in _sharded(model):
        # Values arrived below what counts versions.
        torch.autograd.graph.increment_version(tensor)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(states)
        apply_groups(optimizer, parameter_names(model), _saved_groups(folder))
    return folder.object(EXTRA) if folder.has(EXTRA) else None


def _open(path: str | os.PathLike[str]) -> CheckpointFolder:
    target = Path(path).absolute()
    previous = target.with_name(target.name + PREVIOUS)
    if not target.exists() and previous.exists():
        _warn(
            f"{target} is not there because the save that was to replace it was interrupted; "
            f"{previous} is what it was to replace, and is loaded"
        )
        target = previous
    if not target.is_dir():
        incomplete = target.with_name(target.name + INCOMPLETE)
        hint = (
            f"; {incomplete.name} is what an interrupted save left" if incomplete.exists() else ""
        )
        raise CheckpointError(f"there is no checkpoint at {target}{hint}")
    return CheckpointFolder(target)


def _sharded(model: nn.Module) -> list[torch.Tensor]:
    return [param for param in model.parameters() if isinstance(param, UnevenDTensor)]


def _wanted(key: str, tensor: torch.Tensor) -> list[Wanted]:
    """The blocks of a tensor that are on this rank."""
    if isinstance(tensor, UnevenDTensor):
        local = local_of(tensor).detach()
        return [Wanted(key, chunk.offsets, local[chunk.local]) for chunk in tensor.chunks()]
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{key} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use torch's "
            "own torch.distributed.checkpoint.load for such a model"
        )
    return [Wanted(key, (0,) * tensor.dim(), tensor.detach())]


def _fill(folder: CheckpointFolder, wanted: list[Wanted]) -> None:
    for block, count in zip(wanted, folder.fill(wanted), strict=True):
        if count != block.target.numel():
            raise CheckpointError(
                f"{folder.path} is incomplete: of {block.target.numel()} elements of {block.key} "
                f"from {block.offset} on, {count} are there"
            )


def _new_states(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: list[Wanted],
) -> dict[Any, dict[str, Any]]:
    """State for every parameter that has some in the checkpoint; tensors are yet to be filled."""
    names = parameter_names(model)
    by_name = _saved_states(folder)
    found: dict[Any, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state: dict[str, Any] = {}
            for key in by_name.get(names[param], ()):
                name = key.removeprefix(f"{OPTIMIZER_STATE}{names[param]}.")
                state[name] = _new_state(folder, key, param, wanted)
            if state:
                found[param] = state
    return found


def _saved_states(folder: CheckpointFolder) -> dict[str, list[str]]:
    """Keys of optimizer state by parameter."""
    found: dict[str, list[str]] = {}
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(OPTIMIZER_STATE):
            name = key.removeprefix(OPTIMIZER_STATE).rpartition(".")[0]
            found.setdefault(name, []).append(key)
    return found


def _saved_groups(folder: CheckpointFolder) -> list[dict[str, Any]]:
    """Options of an optimizer's groups: one object here, one per option where torch saved them."""
    if folder.has(OPTIMIZER_GROUPS):
        found: list[dict[str, Any]] = folder.object(OPTIMIZER_GROUPS)
        return found
    groups: dict[str, dict[str, Any]] = {}
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(f"{OPTIMIZER_GROUPS}."):
            number, _, option = key.removeprefix(f"{OPTIMIZER_GROUPS}.").partition(".")
            is_object = folder.shape(key) is None
            value = folder.object(key) if is_object else folder.read_tensor(key)
            groups.setdefault(number, {"params": []})[option] = value
    return list(groups.values())


def _new_state(
    folder: CheckpointFolder, key: str, param: torch.Tensor, wanted: list[Wanted]
) -> Any:
    entry = folder.metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return folder.object(key)
    if entry.size == param.shape:
        tensor = torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
    else:
        # Step counts and the like stay on the host, where torch keeps them too.
        device = param.device if entry.size.numel() > 1 else "cpu"
        tensor = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
    wanted += _wanted(key, tensor)
    return tensor


def _compare(
    folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Comparison:
    mine = model_entries(model)
    saved = folder.metadata.state_dict_metadata
    missing = [key for key in mine if key not in saved]
    unexpected = [
        key
        for key, entry in saved.items()
        if key.startswith(MODEL)
        and key not in mine
        and not (is_extra_state(key) and isinstance(entry, TensorStorageMetadata))
    ]
    mismatched = {}
    for key, value in mine.items():
        entry = saved.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(entry.size) != tuple(value.shape):
            mismatched[key] = f"{key} is {tuple(entry.size)} there and {tuple(value.shape)} here"
    if optimizer is not None:
        names = set(parameter_names(model).values())
        states = _saved_states(folder)
        unexpected += [key for name, keys in states.items() if name not in names for key in keys]
        if not any(key.startswith(OPTIMIZER_GROUPS) for key in saved):
            missing.append(OPTIMIZER_GROUPS)
    return Comparison(tuple(missing), tuple(unexpected), mismatched)


def _warn(text: str) -> None:
    """Warn whoever called this package."""
    warnings.warn(text, skip_file_prefixes=(str(Path(__file__).parent),))


def _list(what: str, names: tuple[str, ...]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{what}: {', '.join(names[:_MOST_NAMES])}{more}"
