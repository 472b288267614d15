"""Load a checkpoint at any world size and with any strategy; every rank reads its own shards.

The checkpoint is read twice. First all ranks compare names and shapes and verify every byte they
need, without changing model or optimizer; new optimizer state is filled already. If no rank found
a problem, the model is filled from the same open files.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    MODEL,
    OPTIMIZER_STATE,
    extra_state_names,
    is_extra_state,
    model_entries,
    parameter_names,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import (
    CheckpointError,
    ReplacedError,
    all_ranks_or_raise,
    everyones,
)
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.optimizer_fit import OptimizerFit, saved_states
from megatron_fsdp_v2.checkpoint.replacing import find_folder, interrupted_saves
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
            # Not raised yet: other ranks may have read another checkpoint.
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
    """Read and verify everything, without changing model or optimizer."""
    folder = _open_folder(path)
    fit = OptimizerFit(folder, model, optimizer) if optimizer is not None else None
    difference = _compare_with(folder, model, fit)
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


def _wanted(key: str, tensor: torch.Tensor) -> list[ReadRequest]:
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
    wanted += _wanted(key, tensor)
    return tensor


_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the names and shapes of a checkpoint fit a model and its optimizer.

    Attributes:
        missing: Names in the model that are not in the checkpoint.
        unexpected: Names in the checkpoint that are not in the model.
        mismatched: Names with another shape or a dtype that does not convert, and the optimizer if
            it is of another class; each with a sentence.
        regrouped: Sentences on parameters that share a parameter group on one side only.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    regrouped: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.mismatched or self.regrouped)

    @override
    def __str__(self) -> str:
        parts = [_list("missing in the checkpoint", self.missing)]
        parts.append(_list("not in the model", self.unexpected))
        parts.append(_list("of another kind", tuple(self.mismatched.values())))
        parts.append(_list("of other groups", self.regrouped))
        return "; ".join(part for part in parts if part) or "everything fits"


def compare(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Comparison:
    """Compare a checkpoint with a model by name, shape and dtype, and with its optimizer.

    Reads only metadata and options of the optimizer, without communication.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    folder = _open_folder(path)
    fit = OptimizerFit(folder, model, optimizer) if optimizer is not None else None
    return _compare_with(folder, model, fit)


def _open_folder(path: str | os.PathLike[str]) -> CheckpointFolder:
    """Open the checkpoint at a path.

    Raises:
        CheckpointError: There is none; the message names what an interrupted save left.
    """
    target = Path(path).absolute()
    if target.is_file() or find_folder(target) is None:
        left = [folder.name for folder in interrupted_saves(Path(os.path.realpath(target)))]
        hint = f"; {left[0]} is what an interrupted save left" if left else ""
        raise CheckpointError(f"there is no checkpoint at {target}{hint}")
    return CheckpointFolder(target)


def _compare_with(
    folder: CheckpointFolder, model: nn.Module, fit: OptimizerFit | None
) -> Comparison:
    """Compare an open checkpoint with a model.

    Args:
        folder: The checkpoint.
        model: The model.
        fit: The comparison with the optimizer; None to compare the model only.
    """
    mine = model_entries(model)
    saved = folder.metadata.state_dict_metadata
    tied = tied_entries(model)
    # Other libraries write a tied tensor under any one of its names.
    there = {tied.get(key, key) for key in mine if key in saved}
    missing = [key for key in mine if key not in saved and tied.get(key, key) not in there]
    unexpected = [
        key
        for key, entry in saved.items()
        if key.startswith(MODEL)
        and key not in mine
        and not (is_extra_state(key) and isinstance(entry, TensorStorageMetadata))
    ]
    mismatched = {}
    for key, value in mine.items():
        problem = _problem(key, value, saved[key]) if key in saved else None
        if problem is not None:
            mismatched[key] = problem
    if fit is None:
        return Comparison(tuple(missing), tuple(unexpected), mismatched)
    return Comparison(
        (*missing, *fit.missing),
        (*unexpected, *fit.unexpected),
        mismatched | fit.mismatched,
        tuple(fit.regrouped),
    )


def _problem(key: str, value: Any, entry: Any) -> str | None:
    """Why an entry of a checkpoint cannot fill one of the model; None if it can."""
    if not isinstance(entry, TensorStorageMetadata):
        return f"{key} is not a tensor there" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{key} is a tensor there and not here"
    if tuple(entry.size) != tuple(value.shape):
        return f"{key} is {tuple(entry.size)} there and {tuple(value.shape)} here"
    dtype = entry.properties.dtype
    if not torch.can_cast(dtype, value.dtype):
        return f"{key} is of {dtype} there and of {value.dtype} here"
    return None


def _list(what: str, names: tuple[str, ...]) -> str:
    return f"{what}: {listed(names, _MOST_NAMES)}" if names else ""
