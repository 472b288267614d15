"""How a checkpoint fits a model and its optimizer: names, shapes and dtypes, before values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import (
    MODEL,
    is_extra_state,
    model_entries,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.optimizer_fit import OptimizerFit
from megatron_fsdp_v2.checkpoint.replacing import find_folder, interrupted_saves

__all__ = ["Comparison", "compare", "compare_with", "open_folder"]

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the names and shapes of a checkpoint fit a model and its optimizer.

    Attributes:
        missing: What the model has and the checkpoint does not.
        unexpected: What the checkpoint has and the model does not.
        mismatched: Names of other shapes, or of dtypes that do not convert to those here, and the
            optimizer if it is of another kind; each with a sentence.
        regrouped: Parameters that are together in a group of the optimizer on one side only, a
            sentence each.
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

    Reads metadata and options of the optimizer only; no communication.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    folder = open_folder(path)
    fit = OptimizerFit(folder, model, optimizer) if optimizer is not None else None
    return compare_with(folder, model, fit)


def open_folder(path: str | os.PathLike[str]) -> CheckpointFolder:
    """Open the checkpoint at a path.

    Raises:
        CheckpointError: There is none; says what an interrupted save left.
    """
    target = Path(path).absolute()
    if target.is_file() or find_folder(target) is None:
        left = [folder.name for folder in interrupted_saves(Path(os.path.realpath(target)))]
        hint = f"; {left[0]} is what an interrupted save left" if left else ""
        raise CheckpointError(f"there is no checkpoint at {target}{hint}")
    return CheckpointFolder(target)


def compare_with(
    folder: CheckpointFolder, model: nn.Module, fit: OptimizerFit | None
) -> Comparison:
    """Compare an open checkpoint with a model.

    Args:
        folder: The checkpoint.
        model: The model.
        fit: How it fits the optimizer; None where that is not asked.
    """
    mine = model_entries(model)
    saved = folder.metadata.state_dict_metadata
    tied = tied_entries(model)
    # Other libraries write a tensor with several names under one of them and do not say which.
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
    """Why an entry of a model cannot be filled with one of a checkpoint; None where it can."""
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
