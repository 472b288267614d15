"""Compare the optimizer of a checkpoint with the one to load into, before changing it.

State of one kind of optimizer in another one trains on without a word, or fails in the next step.
So kinds are compared, and groups and states parameter by parameter; nothing is loaded here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2.checkpoint.entries import (
    OPTIMIZER_GROUPS,
    OPTIMIZER_KIND,
    OPTIMIZER_STATE,
    groups_entry,
    kind_entry,
    parameter_names,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder

__all__ = ["OptimizerFit", "saved_states"]


class OptimizerFit:
    """Comparison of a checkpoint with an optimizer. No communication.

    Args:
        folder: The checkpoint.
        model: The model whose parameters it steps.
        optimizer: The optimizer at hand.

    Attributes:
        missing: Names of what it has and the checkpoint does not.
        unexpected: Names of what the checkpoint has and it does not.
        mismatched: Names of what cannot be loaded at all, each with a sentence.
        regrouped: Sentences on groups that are made of other parameters.

    Raises:
        ValueError: The optimizer steps a parameter that the model does not have.
        CheckpointError: What is stored cannot be read.
    """

    def __init__(
        self, folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._optimizer = optimizer
        names = parameter_names(model)
        own: list[Mapping[str, Any]] = list(groups_entry(optimizer, names))
        self._own = [list(group["params"]) for group in own]
        # Torch can save options under names of parameters, which tells of no groups.
        self._saved, self._has_groups = _saved_groups(folder)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.regrouped: list[str] = []
        states = saved_states(folder)
        known = {name for group in self._own for name in group}
        self.unexpected += [key for name in states.keys() - known for key in states[name]]
        self.unexpected.sort()
        if self._saved is None:
            self.missing.append(OPTIMIZER_GROUPS)
            return
        kind = folder.object(OPTIMIZER_KIND) if folder.has(OPTIMIZER_KIND) else {}
        problem = _other_kind(kind, self._saved, optimizer, own)
        if problem is not None:
            self.mismatched[OPTIMIZER_KIND] = problem
            return
        self._compare_groups()
        shapes = {name: tuple(param.shape) for param, name in names.items()}
        self.missing += _missing_states(self._saved, states, shapes)

    def options(self) -> list[dict[str, Any]]:
        """Return the saved options for each parameter group.

        Raises:
            CheckpointError: Parameters of one group were saved with different options.
        """
        saved = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in self._saved or ()
            for name in group["params"]
        }
        found = []
        for group in self._own:
            known = [name for name in group if name in saved]
            for name in known[1:]:
                _check_equal(known[0], saved[known[0]], name, saved[name])
            found.append(copy.deepcopy(saved[known[0]]) if known else {})
        return found

    def _compare_groups(self) -> None:
        """Find parameters that are in no group on one side, and groups of other parameters."""
        assert self._saved is not None
        there = _group_of([list(group["params"]) for group in self._saved])
        here = _group_of(self._own)
        self.missing += [f"{OPTIMIZER_GROUPS} of {name}" for name in here if name not in there]
        self.unexpected += [f"{OPTIMIZER_GROUPS} of {name}" for name in there if name not in here]
        both = [name for name in here if name in there]
        if not self._has_groups:
            return
        # Groups are the same where a number here always goes with one number there.
        pairs: dict[int, tuple[int, str]] = {}
        back: dict[int, tuple[int, str]] = {}
        for name in both:
            mine, theirs = here[name], there[name]
            for one, other, seen, where in (
                (mine, theirs, pairs, "in one group of the optimizer and in two there"),
                (theirs, mine, back, "in two groups of the optimizer and in one there"),
            ):
                number, first = seen.setdefault(one, (other, name))
                if number != other:
                    self.regrouped.append(f"{first} and {name} are {where}")
                    return


def saved_states(folder: CheckpointFolder) -> dict[str, list[str]]:
    """Return the keys of optimizer state by parameter."""
    found: dict[str, list[str]] = {}
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(OPTIMIZER_STATE):
            name = key.removeprefix(OPTIMIZER_STATE).rpartition(".")[0]
            found.setdefault(name, []).append(key)
    return found


def _saved_groups(folder: CheckpointFolder) -> tuple[list[dict[str, Any]] | None, bool]:
    """Read options of parameter groups, and whether the groups themselves are known.

    One object here; where torch saved them one per option and group, or per option and parameter.
    """
    if folder.has(OPTIMIZER_GROUPS):
        found: Any = folder.object(OPTIMIZER_GROUPS)
        is_right = isinstance(found, list) and all(
            isinstance(group, dict)
            and all(isinstance(option, str) for option in group)
            and isinstance(group.get("params"), list)
            and all(isinstance(name, str) for name in group["params"])
            for group in found
        )
        if not is_right:
            raise CheckpointError(f"{folder.path}: {OPTIMIZER_GROUPS} is not a list of groups")
        return list(found), True
    groups: dict[str, dict[str, Any]] = {}
    has_groups = True
    for key in folder.metadata.state_dict_metadata:
        if key.startswith(f"{OPTIMIZER_GROUPS}."):
            where, _, option = key.removeprefix(f"{OPTIMIZER_GROUPS}.").rpartition(".")
            is_object = folder.shape(key) is None
            value = folder.object(key) if is_object else folder.read_tensor(key)
            is_number = where.isdecimal()
            has_groups &= is_number
            group = groups.setdefault(where, {"params": [] if is_number else [where]})
            group[option] = value
    return list(groups.values()) or None, has_groups


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
    here = {key for group in own for key in group} - {"params"}
    there = {key for group in saved for key in group} - {"params"}
    lacking_there = sorted(set(mine["options"]) - there)
    lacking_here = sorted((set(map(str, kind["options"])) if is_known else there) - here)
    if not is_known and not (lacking_here and lacking_there):
        lacking_here, lacking_there = [], []
    who = f"saved from {kind.get('class')}" if is_known else "saved from another optimizer"
    parts = []
    if lacking_here:
        parts.append(f"it has no {', '.join(lacking_here)}")
    if lacking_there:
        parts.append(f"{', '.join(lacking_there)} does not exist")
    parts += _fixed_otherwise(saved, optimizer)
    if not parts:
        return None
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
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    """Find state that a parameter lacks although others of its group and rank have it.

    A parameter without any was never stepped. Optimizers that factor state have other states of
    vectors than of matrices.
    """
    for group in groups:
        by_kind: dict[int, dict[str, set[str]]] = {}
        for name in group["params"]:
            if name in states and name in shapes:
                own = {key.rpartition(".")[2] for key in states[name]}
                by_kind.setdefault(len(shapes[name]), {})[name] = own
        for named in by_kind.values():
            every = set().union(*named.values())
            for name, own in named.items():
                yield from (f"{OPTIMIZER_STATE}{name}.{state}" for state in sorted(every - own))


def _group_of(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: number for number, group in enumerate(groups) for name in group}


def _check_equal(
    first: str, options: Mapping[str, Any], name: str, others: Mapping[str, Any]
) -> None:
    differing = sorted(
        key for key in options.keys() | others.keys() if not _same(options, others, key)
    )
    if differing:
        raise CheckpointError(
            f"{name} and {first} are in one group of the optimizer and were saved with different "
            f"{', '.join(differing)}; make the groups as they were"
        )


def _same(options: Mapping[str, Any], others: Mapping[str, Any], key: str) -> bool:
    if key not in options or key not in others:
        return False
    return _is_equal(options[key], others[key])


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not all(isinstance(value, torch.Tensor | int | float) for value in (one, other)):
            return False
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return bool(one.shape == other.shape and (one.cpu() == other.cpu()).all())
    return bool(one == other)
