"""Load a checkpoint at any world size and with any strategy; every rank reads its own shards.

The checkpoint is read twice. First all ranks compare names and shapes and verify every byte they
need, without changing model or optimizer; new optimizer state is filled already. If no rank found
a problem, the model is filled from the same open files.

State of one kind of optimizer in another one trains on without an error, or fails in the next step.
So kinds are compared, and groups and states parameter by parameter.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    MODEL,
    OPTIMIZER_GROUPS,
    OPTIMIZER_KIND,
    OPTIMIZER_STATE,
    extra_state_names,
    groups_entry,
    is_extra_state,
    kind_entry,
    model_entries,
    parameter_names,
    states_by_parameter,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import (
    CheckpointError,
    ReplacedError,
    all_ranks_or_raise,
    everyones,
    warn,
)
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.manifest import Entry
from megatron_fsdp_v2.checkpoint.ranks import check_names, check_same_path, group_of
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, replicated
from megatron_fsdp_v2.runtime.module import make_idle, showing_sharded

_ATTEMPTS = 20
_PAUSE_S = 0.05


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load what `save` saved, in place. Collective over the ranks of the model's meshes.

    A model that is not sharded is loaded by all ranks.

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
        process_group: Ranks that load together, instead of those of the model's meshes. It must
            contain those.

    Returns:
        The `extra` of `save`; tensors in it are on the CPU.

    Raises:
        CheckpointError: There is no complete checkpoint, it is damaged, or of another model; raised
            on every rank when one of them finds it.
        ValueError: `process_group` lacks ranks of the model, or ranks have different parameters of
            one name (experts). Nothing is loaded.
    """
    group = group_of(model, process_group)
    check_names(model, group)
    ready = _ready_everywhere(path, lambda: _checked(path, model, optimizer, strict), group)
    if ready.extra_states:
        own = model.state_dict()
        before = {name: own[name] for name in ready.extra_states}
        all_ranks_or_raise(
            f"set extra state from {path}",
            lambda: model.load_state_dict(ready.extra_states, strict=False),
            undo=lambda: model.load_state_dict(before, strict=False),
            group=group,
        )
    all_ranks_or_raise(f"load {path}", lambda: _write(ready, model, optimizer), group=group)
    return ready.extra


@dataclass(slots=True)
class _Ready:
    """Everything a rank needs to load, verified.

    Attributes:
        folder: The checkpoint, open.
        weights: Blocks of the model to fill.
        extra_states: Arguments of modules' `set_extra_state`, by name in the model's state dict.
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


def _ready_everywhere(
    path: str | os.PathLike[str], check: Callable[[], _Ready], group: Any
) -> _Ready:
    """Check one checkpoint on all ranks, and the next one if a save replaces it meanwhile."""

    def check_unless_replaced() -> _Ready | None:
        with contextlib.suppress(ReplacedError):
            return check()
        return None

    for _ in range(_ATTEMPTS):
        ready = all_ranks_or_raise(f"load {path}", check_unless_replaced, group=group)
        identities = everyones(ready.folder.identity if ready is not None else None, group)
        if ready is not None and len(set(identities)) == 1:
            return ready
        time.sleep(_PAUSE_S)
    check_same_path(os.path.realpath(path), group)
    raise CheckpointError(f"{path} is replaced faster than all ranks can read it")


def _checked(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None, strict: bool
) -> _Ready:
    """Read and verify everything, without changing model or optimizer."""
    make_idle(model)
    folder = CheckpointFolder(Path(path))
    difference = _compare_model(folder, model)
    saved_groups: list[dict[str, Any]] = []
    if optimizer is not None:
        saved_groups = _compare_optimizer(folder, model, optimizer, difference)
    if difference.mismatched or (strict and not difference.fits):
        hint = "" if difference.mismatched else "; strict=False loads what both have"
        raise CheckpointError(f"{folder.path} is of another model: {difference}{hint}")
    ready, extra_names = _Ready(folder), extra_state_names(model)
    for key, value in model_entries(model).items():
        if key not in folder.entries:
            continue
        if isinstance(value, torch.Tensor):
            ready.weights += requests_for(key, value)
        else:
            ready.extra_states[extra_names[key]] = folder.object(key)
    folder.fill(ready.weights, only_check=True)
    if optimizer is not None:
        own = groups_entry(optimizer, parameter_names(model))
        ready.options = _saved_options(own, saved_groups)
        blocks: list[ReadRequest] = []
        ready.states = _new_states(folder, model, optimizer, ready.options, blocks)
        with torch.no_grad():
            folder.fill(blocks)
    if EXTRA in folder.entries:
        is_tensor = folder.shape(EXTRA) is not None
        ready.extra = folder.read_tensor(EXTRA) if is_tensor else folder.object(EXTRA)
    if not difference.fits:
        warn(f"{folder.path} fits in part: {difference}")
    return ready


def _write(ready: _Ready, model: nn.Module, optimizer: Optimizer | None) -> None:
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
    if any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise CheckpointError(f"{key} is an expanded tensor, which cannot be filled; clone() it")
    return [ReadRequest(key, (0,) * tensor.dim(), tensor.detach())]


def _new_states(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: Optimizer,
    options: Sequence[Mapping[str, Any]],
    wanted: list[ReadRequest],
) -> dict[Any, dict[str, Any]]:
    """Allocate state for every parameter that has some in the checkpoint."""
    names, saved = parameter_names(model), states_by_parameter(folder.entries)
    fixed = getattr(optimizer, "name_to_dtype_map", {})
    found: dict[Any, dict[str, Any]] = {}
    for group, loaded in zip(optimizer.param_groups, options, strict=True):
        counts_on_host = not any({**group, **loaded}.get(o) for o in ("fused", "capturable"))
        for param in group["params"]:
            # A parameter that was never stepped has no entry.
            for state, key in saved.get(names[param], {}).items():
                # Torch's `load_state_dict` does the same: fused kernels count steps on the device.
                device = "cpu" if state == "step" and counts_on_host else param.device
                entry, of_param = folder.entries[key], folder.entries.get(MODEL + names[param])
                # Torch also casts state to the dtype of its parameter. State saved in another dtype
                # than its parameter keeps that dtype.
                # Scalars, and all state of Transformer Engine's FusedAdam, are in fp32.
                is_fixed = entry.shape == () != param.shape or state in fixed
                is_other = of_param is not None and of_param.dtype != entry.dtype
                dtype = entry.dtype if is_fixed or is_other else param.dtype
                value = _new_state(folder, key, param, dtype, device, wanted)
                found.setdefault(param, {})[state] = value
    return found


def _new_state(
    folder: CheckpointFolder,
    key: str,
    param: torch.Tensor,
    dtype: torch.dtype | None,
    device: Any,
    wanted: list[ReadRequest],
) -> Any:
    entry = folder.entries[key]
    if entry.dtype is None:
        return folder.object(key)
    folder.check_stored(key)
    if entry.shape == param.shape:
        tensor = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(entry.shape, dtype=dtype, device=device)
    wanted += requests_for(key, tensor)
    if entry.shape and entry.shape != param.shape and isinstance(param, UnevenDTensor):
        # As in a step that computes it from whole tensors, such as Adafactor's means of rows.
        return replicated(tensor, param.device_mesh)
    return tensor


def compare(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> Comparison:
    """Compare a checkpoint with a model by name, shape and dtype, and with its optimizer.

    Reads only the index and the optimizer's options. A rank may call it alone: it neither
    communicates nor reshards.

    Raises:
        CheckpointError: There is no complete checkpoint.
        ValueError: The optimizer steps a parameter that the model does not have.
    """
    folder = CheckpointFolder(Path(path))
    with showing_sharded(model):
        found = _compare_model(folder, model)
        if optimizer is not None:
            _compare_optimizer(folder, model, optimizer, found)
    return found


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


def _compare_model(folder: CheckpointFolder, model: nn.Module) -> Comparison:
    """Compare an open checkpoint with a model."""
    mine, tied = model_entries(model), tied_entries(model)
    saved = folder.entries
    # Other libraries write a tied tensor under any one of its names.
    there = {tied.get(key, key) for key in mine if key in saved}
    found = Comparison([k for k in mine if k not in saved and tied.get(k, k) not in there])
    others = (key for key in saved if key.startswith(MODEL) and key not in mine)
    found.unexpected += (k for k in others if not is_extra_state(k) or folder.shape(k) is None)
    for key, value in mine.items():
        problem = _problem(key, value, saved[key]) if key in saved else None
        if problem is not None:
            found.mismatched[key] = problem
    return found


def _problem(key: str, value: Any, entry: Entry) -> str | None:
    """Return the reason why an entry cannot fill one of the model; None if it can."""
    if entry.dtype is None:
        return f"{key} is not a tensor there" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{key} is a tensor there and not here"
    if entry.shape != value.shape:
        return f"{key} is {entry.shape} there and {tuple(value.shape)} here"
    if not torch.can_cast(entry.dtype, value.dtype):
        return f"{key} is of {entry.dtype} there and of {value.dtype} here"
    return None


def _compare_optimizer(
    folder: CheckpointFolder, model: nn.Module, optimizer: Optimizer, found: Comparison
) -> list[dict[str, Any]]:
    """Compare an open checkpoint with an optimizer.

    Args:
        folder: The checkpoint.
        model: The model whose parameters it steps.
        optimizer: The optimizer at hand.
        found: Where differences are added.

    Returns:
        The saved parameter groups, with options.

    Raises:
        ValueError: The optimizer steps a parameter that the model does not have.
        CheckpointError: What is stored cannot be read.
    """
    names = parameter_names(model)
    own = groups_entry(optimizer, names)
    # Torch can save options under names of parameters, which tells of no groups.
    saved, has_groups = _saved_groups(folder)
    here, there, states = _group_of(own), _group_of(saved), states_by_parameter(folder.entries)
    others = states.keys() - here.keys()
    found.unexpected += sorted(key for name in others for key in states[name].values())
    if not saved:
        found.missing.append(OPTIMIZER_GROUPS)
        return saved
    kind = folder.object(OPTIMIZER_KIND) if OPTIMIZER_KIND in folder.entries else None
    problem = _other_kind(kind, saved, optimizer, own)
    if problem is not None:
        found.mismatched[OPTIMIZER_KIND] = problem
        return saved
    _compare_groups(here, there, found, has_groups=has_groups)
    num_dims = {name: param.dim() for param, name in names.items()}
    found.missing += _missing_states(there, states, num_dims)
    return saved


type _Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimizer: options, and names of parameters."""


def _saved_options(own: _Groups, saved: _Groups) -> list[dict[str, Any]]:
    """Return the saved options for each parameter group of the optimizer at hand.

    Raises:
        CheckpointError: Parameters of one group were saved with different options.
    """
    by_name = {name: group for group in saved for name in group["params"]}
    found: list[dict[str, Any]] = []
    for group in own:
        known = [name for name in group["params"] if name in by_name]
        first = by_name[known[0]] if known else {}
        for name in known:
            other = by_name[name]
            differing = [
                key
                for key in sorted((first.keys() | other.keys()) - {"params"})
                if not _is_equal(first.get(key, _ABSENT), other.get(key, _ABSENT))
            ]
            if differing:
                raise CheckpointError(
                    f"{name} and {known[0]} are in one group of the optimizer and were saved with "
                    f"different {', '.join(differing)}; make the groups as they were"
                )
        options = copy.deepcopy({k: v for k, v in first.items() if k != "params"})
        # A learning rate in a tensor stays on its device.
        tensors = {k: v for k, v in group.items() if isinstance(v, torch.Tensor)}
        for key in tensors.keys() & options.keys():
            options[key] = torch.as_tensor(options[key]).to(tensors[key].device)
        found.append(options)
    return found


_ABSENT = object()


def _saved_groups(folder: CheckpointFolder) -> tuple[list[dict[str, Any]], bool]:
    """Read options of parameter groups, and whether the groups themselves are known.

    One object here; where torch saved them one per option and group, or per option and parameter.
    """
    groups: dict[str, dict[str, Any]] = {}
    if OPTIMIZER_GROUPS in folder.entries:
        saved = folder.object(OPTIMIZER_GROUPS)
    else:
        for key in folder.entries:
            if key.startswith(f"{OPTIMIZER_GROUPS}."):
                where, _, option = key.removeprefix(f"{OPTIMIZER_GROUPS}.").rpartition(".")
                is_object = folder.shape(key) is None
                group = groups.setdefault(where, {"params": [] if where.isdecimal() else [where]})
                group[option] = folder.object(key) if is_object else folder.read_tensor(key)
        saved = list(groups.values())
    checked: list[Any] = saved if isinstance(saved, list) else [None]
    for each in checked:
        params = each.get("params") if isinstance(each, dict) else None
        if not isinstance(params, list) or any(type(n) is not str for n in (*each, *params)):
            raise CheckpointError(f"{folder.path}: {OPTIMIZER_GROUPS} is not a list of groups")
    return saved, all(map(str.isdecimal, groups))


def _compare_groups(
    here: Mapping[str, int], there: Mapping[str, int], found: Comparison, *, has_groups: bool
) -> None:
    """Find parameters that are in no group on one side, and groups of other parameters.

    Args:
        here: Number of the group of each parameter of the optimizer at hand.
        there: Number of the group of each saved parameter.
        found: Where differences are added.
        has_groups: Whether the saved groups themselves are known.
    """
    found.missing += [f"{OPTIMIZER_GROUPS} of {name}" for name in here if name not in there]
    found.unexpected += [f"{OPTIMIZER_GROUPS} of {name}" for name in there if name not in here]
    # Groups are equal if their numbers map to each other one to one.
    for one, other, where in (
        (here, there, "in one group of the optimizer and in two of the checkpoint"),
        (there, here, "in two groups of the optimizer and in one of the checkpoint"),
    ):
        first: dict[int, str] = {}
        for name in filter(there.__contains__, here) if has_groups else ():
            known = first.setdefault(one[name], name)
            if other[known] != other[name]:
                found.regrouped.append(f"{known} and {name} are {where}")
                break


def _other_kind(kind: Any, saved: _Groups, optimizer: Optimizer, own: _Groups) -> str | None:
    """Explain why the saved optimizer is of another class; None if it may be the same.

    Schedulers, users and new versions of torch add options. For equal classes any options are
    accepted; two different classes must have the same options; if the saved class is unknown,
    either side may have more options.
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


def _fixed_otherwise(saved: _Groups, optimizer: Optimizer) -> Iterator[str]:
    """Find options that are fixed by the class and were saved with another value.

    AdamW is Adam with `decoupled_weight_decay=True`, which AdamW's constructor does not accept.
    """
    choices = inspect.signature(type(optimizer).__init__).parameters
    if any(choice.kind is choice.VAR_KEYWORD for choice in choices.values()):
        return
    for option, value in optimizer.defaults.items():
        others = [g[option] for g in saved if option in g and not _is_equal(g[option], value)]
        if option not in choices and others:
            yield f"{option} is {others[0]} there and always {value} here"


def _missing_states(
    group_of: Mapping[str, int],
    states: Mapping[str, Mapping[str, str]],
    num_dims: Mapping[str, int],
) -> Iterator[str]:
    """Yield the states that a parameter lacks and others of its group with as many dimensions have.

    A parameter without any was never stepped. Optimizers that factor state have other states of
    vectors than of matrices.
    """
    every: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    stepped = [name for name in group_of if name in states and name in num_dims]
    for name in stepped:
        every[group_of[name], num_dims[name]].update(states[name])
    for name in stepped:
        lacking = sorted(every[group_of[name], num_dims[name]] - states[name].keys())
        yield from (f"{OPTIMIZER_STATE}{name}.{state}" for state in lacking)


def _group_of(groups: _Groups) -> dict[str, int]:
    return {name: number for number, group in enumerate(groups) for name in group["params"]}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not all(isinstance(value, torch.Tensor | int | float) for value in (one, other)):
            return False
        one, other = torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu()
        return bool(one.shape == other.shape and (one == other).all())
    return one is other or bool(one == other)
