"""Load a checkpoint at any world size and with any strategy; every rank reads its own shards.

The checkpoint is read twice. First all ranks compare names and shapes and verify every byte they
need, without changing model or optimizer; new optimizer state is filled already. If no rank found
a problem, the model is filled from the same open files.
"""

from __future__ import annotations

import contextlib
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

from megatron_fsdp_v2.checkpoint.comparison import (
    Comparison,
    OptimizerComparison,
    compare_model,
    saved_states,
)
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    OPTIMIZER_STATE,
    extra_state_names,
    model_entries,
    parameter_names,
)
from megatron_fsdp_v2.checkpoint.errors import (
    CheckpointError,
    ReplacedError,
    all_ranks_or_raise,
    everyones,
)
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = ["Comparison", "compare", "load", "requests_for"]

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

    Names, shapes, dtypes, parameter groups and every byte that any rank will read are checked
    first: after an error, model and optimizer are unchanged on all ranks. The next forward uses the
    loaded weights, in evaluation as well.

    Args:
        path: The folder.
        model: Sharded in any way, at any world size; or not at all.
        optimizer: An optimizer of its parameters, of the class that was saved; options of
            parameter groups are loaded too. State of parameters saved without state is dropped.
        strict: Whether missing or unexpected names, or parameter groups of other parameters, are
            errors. If False, they are warnings and the common entries are loaded. Another shape, a
            dtype that does not convert and an optimizer of another class are always errors.

    Returns:
        The `extra` of `save`; tensors in it are on the CPU.

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

        all_ranks_or_raise(
            f"set extra state from {path}",
            lambda: set_extra_states(ready.extra_states),
            undo=lambda: set_extra_states(before),
        )
    all_ranks_or_raise(f"load {path}", lambda: _write(ready, model, optimizer))
    return ready.extra


@dataclass(slots=True)
class _Ready:
    """Everything a rank needs to load, verified.

    Attributes:
        folder: The checkpoint, open.
        weights: Blocks of the model to fill.
        extra_states: Arguments of modules' `set_extra_state`, by name in the checkpoint.
        states: New optimizer state, filled.
        options: Options for each parameter group.
        extra: Return value of `load`.
    """

    folder: CheckpointFolder
    weights: list[ReadRequest] = field(default_factory=list)
    extra_states: dict[str, Any] = field(default_factory=dict)
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    extra: Any = None


def _ready_everywhere(path: str | os.PathLike[str], check: Callable[[], _Ready]) -> _Ready:
    """Check the same checkpoint on all ranks; repeated if it is replaced meanwhile."""

    def check_unless_replaced() -> _Ready | None:
        with contextlib.suppress(ReplacedError):
            return check()
        return None

    for _ in range(_ATTEMPTS):
        ready = all_ranks_or_raise(f"load {path}", check_unless_replaced)
        identities = everyones(ready.folder.identity if ready is not None else None)
        if ready is not None and len(set(identities)) == 1:
            return ready
        time.sleep(_PAUSE_S)
    raise CheckpointError(f"{path} is replaced faster than all ranks can read it")


def _checked(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> _Ready:
    """Read and verify everything, without changing model or optimizer."""
    folder = CheckpointFolder(Path(path))
    difference, of_optimizer = compare_model(folder, model), None
    if optimizer is not None:
        of_optimizer = OptimizerComparison(folder, model, optimizer, difference)
    if difference.mismatched or (strict and not difference.fits):
        hint = "" if difference.mismatched else "; strict=False loads what both have"
        raise CheckpointError(f"{folder.path} is of another model: {difference}{hint}")
    ready = _Ready(folder)
    for key, value in model_entries(model).items():
        if not folder.has(key):
            continue
        if isinstance(value, torch.Tensor):
            ready.weights += requests_for(key, value)
        else:
            ready.extra_states[key] = folder.object(key)
    folder.fill(ready.weights, only_check=True)
    if optimizer is not None and of_optimizer is not None:
        ready.options = of_optimizer.options()
        blocks: list[ReadRequest] = []
        ready.states = _new_states(folder, model, optimizer, blocks)
        with torch.no_grad():
            folder.fill(blocks)
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
    """Fill model and optimizer from a verified checkpoint."""
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
            # Filling local memory did not increment it.
            torch.autograd.graph.increment_version(param)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(ready.states)
        for group, options in zip(optimizer.param_groups, ready.options, strict=True):
            group.update(options)


def requests_for(key: str, tensor: torch.Tensor) -> list[ReadRequest]:
    """Requests for the blocks of a tensor that this rank holds."""
    if isinstance(tensor, UnevenDTensor):
        local = local_of(tensor).detach()
        return [ReadRequest(key, chunk.offsets, local[chunk.local]) for chunk in tensor.chunks()]
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{key} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use torch's "
            "own torch.distributed.checkpoint.load for such a model"
        )
    return [ReadRequest(key, (0,) * tensor.dim(), tensor.detach())]


def _new_states(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: list[ReadRequest],
) -> dict[Any, dict[str, Any]]:
    """Allocate state for every parameter that has some in the checkpoint."""
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
        # Scalars such as step counts stay on the host, as in torch.
        device = param.device if entry.size.numel() > 1 else "cpu"
        tensor = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
    wanted += requests_for(key, tensor)
    return tensor


def compare(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Comparison:
    """Compare a checkpoint with a model by name, shape and dtype, and with its optimizer.

    Reads only metadata and options of the optimizer, without communication.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    folder = CheckpointFolder(Path(path))
    found = compare_model(folder, model)
    if optimizer is not None:
        OptimizerComparison(folder, model, optimizer, found)
    return found
