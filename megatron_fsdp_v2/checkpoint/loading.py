"""Loading: at any world size, with any strategy, every rank reads what it holds and no more.

Twice: the first time everything is compared and every byte is checked, on all ranks, while model
and optimizer are as they were. State of the optimizer is new, so it is filled at once. Only when no
rank found anything is the model written, from files that stayed open in between.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.agreement import all_ranks_or_raise, everyones
from megatron_fsdp_v2.checkpoint.comparing import Comparison, compare, compare_with, open_folder
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    OPTIMIZER_STATE,
    extra_state_names,
    model_entries,
    parameter_names,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, ReplacedError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.optimizer_fit import OptimizerFit, saved_states
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = ["Comparison", "compare", "load"]

_ATTEMPTS = 20
_PAUSE_S = 0.05


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Load what `save` saved, in place. Collective over all ranks.

    Names, shapes, dtypes, groups of the optimizer and every byte that any rank will read are
    checked before anything is changed: after an error model and optimizer are on all ranks as they
    were.
    Weights are active in the next forward, evaluation too.

    Args:
        path: The folder.
        model: Sharded in any way, at any world size; or not at all.
        optimizer: Of its parameters and of the kind that was saved; options of groups are loaded
            too. State of parameters that had none is dropped.
        strict: Whether a name that only one side has, or groups of the optimizer that are made of
            other parameters, is an error; otherwise it is a warning, and what both have is loaded.
            A shape that differs, a dtype that does not convert and an optimizer of another kind
            always are errors.

    Returns:
        What was given to `save` as `extra`; tensors in it are on the CPU.

    Raises:
        CheckpointError: There is no complete checkpoint, it is damaged, or of another model; raised
            on every rank when one of them finds it.
    """
    ready = _ready_everywhere(path, lambda: _checked(path, model, optimizer, strict))
    if ready.extra_states:
        before = {key: model_entries(model)[key] for key in ready.extra_states}
        names = extra_state_names(model)

        def set_extra_states(states: dict[str, Any]) -> None:
            model.load_state_dict({names[key]: v for key, v in states.items()}, strict=False)

        try:
            all_ranks_or_raise(
                f"set extra state from {path}", lambda: set_extra_states(ready.extra_states)
            )
        except Exception:
            set_extra_states(before)
            raise
    all_ranks_or_raise(f"load {path}", lambda: _write(ready, model, optimizer))
    return ready.extra


@dataclass(slots=True)
class _Ready:
    """All that a rank needs to load, checked.

    Attributes:
        folder: The checkpoint, open.
        weights: Blocks of the model, yet to be filled.
        extra_states: What modules' `set_extra_state` is to be given, by name in the checkpoint.
        states: New state of the optimizer, filled.
        options: What each of its groups is updated with.
        extra: What `load` returns.
    """

    folder: CheckpointFolder
    weights: list[ReadRequest] = field(default_factory=list)
    extra_states: dict[str, Any] = field(default_factory=dict)
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    extra: Any = None


def _ready_everywhere(path: str | os.PathLike[str], check: Callable[[], _Ready]) -> _Ready:
    """Have all ranks check the same checkpoint, again if it was replaced meanwhile."""
    for _ in range(_ATTEMPTS):
        ready: _Ready | None = None
        error: Exception | None = None
        identity = ""
        try:
            ready = check()
            identity = ready.folder.identity
        except ReplacedError as replaced:
            error = replaced
        except Exception as other:
            # On this rank; whether it matters depends on whether all looked at one checkpoint.
            error, identity = other, f"{type(other).__name__}: {other}"
        kinds = everyones((_kind_of(error), identity))
        if any(kind == "replaced" for kind, _ in kinds) or (
            len({found for kind, found in kinds if kind == "ready"}) > 1
        ):
            time.sleep(_PAUSE_S)
            continue
        if error is not None:
            raise error
        for rank, (kind, text) in enumerate(kinds):
            if kind == "failed":
                raise CheckpointError(f"rank {rank} could not load {path}: {text}")
        assert ready is not None
        return ready
    raise CheckpointError(f"{path} is replaced faster than all ranks can read it")


def _kind_of(error: Exception | None) -> str:
    if error is None:
        return "ready"
    return "replaced" if isinstance(error, ReplacedError) else "failed"


def _checked(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> _Ready:
    """Read everything once and change nothing."""
    folder = open_folder(path)
    fit = OptimizerFit(folder, model, optimizer) if optimizer is not None else None
    difference = compare_with(folder, model, fit)
    if difference.mismatched or (strict and not difference.fits):
        hint = "" if difference.mismatched else "; strict=False loads what both have"
        raise CheckpointError(f"{folder.path} is of another model: {difference}{hint}")
    ready = _Ready(folder)
    for key, value in model_entries(model).items():
        if not folder.has(key):
            continue
        if isinstance(value, torch.Tensor):
            ready.weights += _wanted(key, value)
        else:
            ready.extra_states[key] = folder.object(key)
    _check_counts(folder, ready.weights, folder.check(ready.weights))
    if optimizer is not None and fit is not None:
        ready.options = fit.options()
        blocks: list[ReadRequest] = []
        ready.states = _new_states(folder, model, optimizer, blocks)
        with torch.no_grad():
            _check_counts(folder, blocks, folder.fill(blocks))
    if folder.has(EXTRA):
        is_tensor = folder.shape(EXTRA) is not None
        ready.extra = folder.read_tensor(EXTRA) if is_tensor else folder.object(EXTRA)
    if not difference.fits:
        warnings.warn(
            f"{folder.path} fits in part: {difference}",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )
    return ready


def _write(ready: _Ready, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Change model and optimizer. Nothing is left that could be wrong with the checkpoint."""
    try:
        with torch.no_grad():
            ready.folder.fill(ready.weights)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{ready.folder.path} was intact and could not be read again ({error}); the model is "
            "partly overwritten on this rank, so load once more before you go on"
        ) from error
    for param in model.parameters():
        if isinstance(param, UnevenDTensor):
            # Values arrived below what counts versions.
            torch.autograd.graph.increment_version(param)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(ready.states)
        for group, options in zip(optimizer.param_groups, ready.options, strict=True):
            group.update(options)


def _wanted(key: str, tensor: torch.Tensor) -> list[ReadRequest]:
    """The blocks of a tensor that are on this rank."""
    if isinstance(tensor, UnevenDTensor):
        local = local_of(tensor).detach()
        return [ReadRequest(key, chunk.offsets, local[chunk.local]) for chunk in tensor.chunks()]
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{key} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use torch's "
            "own torch.distributed.checkpoint.load for such a model"
        )
    return [ReadRequest(key, (0,) * tensor.dim(), tensor.detach())]


def _check_counts(folder: CheckpointFolder, wanted: list[ReadRequest], counts: list[int]) -> None:
    for block, count in zip(wanted, counts, strict=True):
        if count != block.target.numel():
            raise CheckpointError(
                f"{folder.path} is incomplete: of {block.target.numel()} elements of {block.key} "
                f"from {block.offset} on, {count} are there"
            )


def _new_states(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: list[ReadRequest],
) -> dict[Any, dict[str, Any]]:
    """State for every parameter that has some in the checkpoint; tensors are yet to be filled."""
    names = parameter_names(model)
    by_name = saved_states(folder)
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


def _new_state(
    folder: CheckpointFolder, key: str, param: torch.Tensor, wanted: list[ReadRequest]
) -> Any:
    entry = folder.metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return folder.object(key)
    folder.check_stored(key)
    if entry.size == param.shape:
        tensor = torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
    else:
        # Step counts and the like stay on the host, where torch keeps them too.
        device = param.device if entry.size.numel() > 1 else "cpu"
        tensor = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
    wanted += _wanted(key, tensor)
    return tensor
