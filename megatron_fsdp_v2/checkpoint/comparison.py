"""Compare the names, shapes and optimizer of a checkpoint with a model, before anything is changed.

State of one kind of optimizer in another one trains on without a word, or fails in the next step.
So kinds are compared, and groups and states parameter by parameter; nothing is loaded here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, override

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import (
    MODEL,
    OPTIMIZER_GROUPS,
    OPTIMIZER_KIND,
    OPTIMIZER_STATE,
    groups_entry,
    is_extra_state,
    kind_entry,
    model_entries,
    parameter_names,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder

__all__ = ["Comparison", "OptimizerComparison", "compare_model", "saved_states"]

_MOST_NAMES = 5


@dataclass(slots=True)
class Comparison:
    """How the names and shapes of a checkpoint fit a model and its optimizer.

    Attributes:
        missing: Names in the model that are not in the checkpoint.
        unexpected: Names in the checkpoint that are not in the model.
        mismatched: Names with another shape or a dtype that does not convert, and the optimizer if
            it is of another class; each with a sentence.
        regrouped: Sentences on parameters that share a parameter group on one side only.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    regrouped: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.mismatched or self.regrouped)

    @override
    def __str__(self) -> str:
        parts = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "of another kind": list(self.mismatched.values()),
            "of other groups": self.regrouped,
        }
        said = [f"{what}: {listed(names, _MOST_NAMES)}" for what, names in parts.items() if names]
        return "; ".join(said) or "everything fits"


def compare_model(folder: CheckpointFolder, model: nn.Module) -> Comparison:
    """Compare an open checkpoint with a model."""
    mine, tied = model_entries(model), tied_entries(model)
    saved = folder.metadata.state_dict_metadata
    # Other libraries write a tied tensor under any one of its names.
    there = {tied.get(key, key) for key in mine if key in saved}
    found = Comparison(
        [key for key in mine if key not in saved and tied.get(key, key) not in there],
        [
            key
            for key, entry in saved.items()
            if key.startswith(MODEL)
            and key not in mine
            and not (is_extra_state(key) and isinstance(entry, TensorStorageMetadata))
        ],
    )
    for key, value in mine.items():
        problem = _problem(key, value, saved[key]) if key in saved else None
        if problem is not None:
            found.mismatched[key] = problem
    return found


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


class OptimizerComparison:
    """Comparison of a checkpoint with an optimizer. No communication.

    Args:
        folder: The checkpoint.
        model: The model whose parameters it steps.
        optimizer: The optimizer at hand.
        found: Where differences are added.

    Raises:
        ValueError: The optimizer steps a parameter that the model does not have.
        CheckpointError: What is stored cannot be read.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        found: Comparison,
    ) -> None:
        names = parameter_names(model)
        own = groups_entry(optimizer, names)
        self._own: list[list[str]] = [group["params"] for group in own]
        # Torch can save options under names of parameters, which tells of no groups.
        self._saved, has_groups = _saved_groups(folder)
        states = saved_states(folder)
        known = {name for group in self._own for name in group}
        found.unexpected += sorted(key for name in states.keys() - known for key in states[name])
        if not self._saved:
            found.missing.append(OPTIMIZER_GROUPS)
            return
        kind = folder.object(OPTIMIZER_KIND) if folder.has(OPTIMIZER_KIND) else None
        problem = _other_kind(kind, self._saved, optimizer, own)
        if problem is not None:
            found.mismatched[OPTIMIZER_KIND] = problem
            return
        there = [group["params"] for group in self._saved]
        _compare_groups(self._own, there, found, has_groups=has_groups)
        num_dims = {name: param.dim() for param, name in names.items()}
        found.missing += _missing_states(there, states, num_dims)

    def options(self) -> list[dict[str, Any]]:
        """Return the saved options for each parameter group.

        Raises:
            CheckpointError: Parameters of one group were saved with different options.
        """
        saved = {name: group for group in self._saved for name in group["params"]}
        found: list[dict[str, Any]] = []
        for names in self._own:
            known = [name for name in names if name in saved]
            first = saved[known[0]] if known else {}
            for name in known:
                differing = [
                    key
                    for key in sorted((first.keys() | saved[name].keys()) - {"params"})
                    if not _is_equal(first.get(key, _ABSENT), saved[name].get(key, _ABSENT))
                ]
                if differing:
                    raise CheckpointError(
                        f"{name} and {known[0]} are in one group of the optimizer and were saved "
                        f"with different {', '.join(differing)}; make the groups as they were"
                    )
            found.append(copy.deepcopy({k: v for k, v in first.items() if k != "params"}))
        return found


_ABSENT = object()


def saved_states(folder: CheckpointFolder) -> dict[str, list[str]]:
    """Return the keys of optimizer state by parameter."""
    found: dict[str, list[str]] = {}
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(OPTIMIZER_STATE):
            name = key.removeprefix(OPTIMIZER_STATE).rpartition(".")[0]
            found.setdefault(name, []).append(key)
    return found


def _saved_groups(folder: CheckpointFolder) -> tuple[list[dict[str, Any]], bool]:
    """Read options of parameter groups, and whether the groups themselves are known.

    One object here; where torch saved them one per option and group, or per option and parameter.
    """
    if folder.has(OPTIMIZER_GROUPS):
        found: Any = folder.object(OPTIMIZER_GROUPS)
        saved: list[Any] = found if isinstance(found, list) else [None]
        for group in saved:
            params = group.get("params") if isinstance(group, dict) else None
            if not isinstance(params, list) or any(type(n) is not str for n in (*group, *params)):
                raise CheckpointError(f"{folder.path}: {OPTIMIZER_GROUPS} is not a list of groups")
        return saved, True
    groups: dict[str, dict[str, Any]] = {}
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(f"{OPTIMIZER_GROUPS}."):
            where, _, option = key.removeprefix(f"{OPTIMIZER_GROUPS}.").rpartition(".")
            is_object = folder.shape(key) is None
            group = groups.setdefault(where, {"params": [] if where.isdecimal() else [where]})
            group[option] = folder.object(key) if is_object else folder.read_tensor(key)
    return list(groups.values()), all(map(str.isdecimal, groups))


def _compare_groups(
    own: Sequence[Sequence[str]],
    saved: Sequence[Sequence[str]],
    found: Comparison,
    *,
    has_groups: bool,
) -> None:
    """Find parameters that are in no group on one side, and groups of other parameters."""
    here, there = _group_of(own), _group_of(saved)
    found.missing += [f"{OPTIMIZER_GROUPS} of {name}" for name in here if name not in there]
    found.unexpected += [f"{OPTIMIZER_GROUPS} of {name}" for name in there if name not in here]
    # Groups are the same where a number here always goes with one number there.
    for one, other, where in (
        (here, there, "in one group of the optimizer and in two there"),
        (there, here, "in two groups of the optimizer and in one there"),
    ):
        first: dict[int, str] = {}
        for name in filter(there.__contains__, here) if has_groups else ():
            known = first.setdefault(one[name], name)
            if other[known] != other[name]:
                found.regrouped.append(f"{known} and {name} are {where}")
                break


def _other_kind(
    kind: Any,
    saved: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    own: Sequence[Mapping[str, Any]],
) -> str | None:
    """Explain why the saved optimizer is of another class; None if it may be the same.

    Schedulers and users add options to groups, and versions of torch add options to optimizers. So
    of one class all is right; of two, either must know all that the other is made with; and where
    the class is not known, one may know more than the other.
    """
    mine = kind_entry(optimizer)
    is_known = isinstance(kind, dict) and isinstance(kind.get("options"), list)
    if is_known and kind.get("class") == mine["class"]:
        return None
    here, there = ({key for group in groups for key in group} for groups in (own, saved))
    lacking_there = sorted(set(mine["options"]) - there)
    lacking_here = sorted((set(map(str, kind["options"])) if is_known else there) - here)
    parts = list(_fixed_otherwise(saved, optimizer))
    if lacking_there and (is_known or lacking_here):
        parts.insert(0, f"{', '.join(lacking_there)} does not exist")
    if lacking_here and (is_known or lacking_there):
        parts.insert(0, f"it has no {', '.join(lacking_here)}")
    if not parts:
        return None
    who = f"saved from {kind.get('class') if is_known else 'another optimizer'}"
    return (
        f"{OPTIMIZER_GROUPS} were {who}, and this is {mine['class']}: {'; '.join(parts)} (load "
        "without the optimizer to take the weights alone)"
    )


def _fixed_otherwise(
    saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer
) -> Iterator[str]:
    """Find options that are fixed by the class and were saved with another value.

    AdamW is Adam with one option that AdamW does not let anybody choose.
    """
    choices = inspect.signature(type(optimizer).__init__).parameters
    if any(choice.kind is choice.VAR_KEYWORD for choice in choices.values()):
        return
    for option, value in optimizer.defaults.items():
        others = [g[option] for g in saved if option in g and not _is_equal(g[option], value)]
        if option not in choices and others:
            yield f"{option} is {others[0]} there and always {value} here"


def _missing_states(
    groups: Sequence[Sequence[str]],
    states: Mapping[str, Sequence[str]],
    num_dims: Mapping[str, int],
) -> Iterator[str]:
    """Find state that a parameter lacks although others of its group and rank have it.

    A parameter without any was never stepped. Optimizers that factor state have other states of
    vectors than of matrices.
    """
    for group in groups:
        every: dict[int, set[str]] = {}
        stepped = [name for name in group if name in states and name in num_dims]
        own = {name: {key.rpartition(".")[2] for key in states[name]} for name in stepped}
        for name in stepped:
            every.setdefault(num_dims[name], set()).update(own[name])
        for name in stepped:
            lacking = sorted(every[num_dims[name]] - own[name])
            yield from (f"{OPTIMIZER_STATE}{name}.{state}" for state in lacking)


def _group_of(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: number for number, group in enumerate(groups) for name in group}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not all(isinstance(value, torch.Tensor | int | float) for value in (one, other)):
            return False
        one, other = torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu()
        return bool(one.shape == other.shape and (one == other).all())
    return one is other or bool(one == other)
