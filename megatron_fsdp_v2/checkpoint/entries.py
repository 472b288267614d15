"""The entries of a checkpoint: names and values of a model and its optimizer.

Names are those of torch's own calls: `model.<parameter>`, `optimizer.state.<parameter>.<state>`,
`optimizer.param_groups`, and `extra`. They say nothing of how anything was sharded. Callers have
made sure that the modules register sharded parameters (`make_idle`, `showing_sharded`).
"""

from __future__ import annotations

import copy
import io
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2.dtensor.optimizer_state import wrap_foreign_state
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.optim.flat import FlatOptimizer

MODEL = "model."
OPTIMIZER_STATE = "optimizer.state."
OPTIMIZER_GROUPS = "optimizer.param_groups"
OPTIMIZER_KIND = "optimizer.kind"
EXTRA = "extra"


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names under which compiled and recomputed modules register the module that they wrap."""


def _plain_name(model: nn.Module, name: str) -> str:
    """Strip the names of torch's wrappers from a name, as torch's `get_state_dict` does."""
    module: Any = model
    parts: list[str] = []
    for part in name.split("."):
        is_replica = part == "module" and isinstance(module, DistributedDataParallel)
        if not (is_replica or part in _WRAPPED):
            parts.append(part)
        # State dicts skip some wrappers, which look up what they lack in the wrapped module.
        module = getattr(module, part, None)
    return ".".join(parts)


def model_entries(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and other state of a model, sharing memory with it.

    Not what quantized modules keep as `_extra_state` in tensors: a rank's own record of past
    scales, of a length that depends on options and no weight of the model.

    Raises:
        ValueError: Two entries have one name without wrappers.
    """
    entries: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        key = MODEL + _plain_name(model, name)
        if is_extra_state(key) and isinstance(value, torch.Tensor | io.BytesIO):
            continue
        if key in entries:
            raise ValueError(f"two entries of the model's state dict are called {key}")
        entries[key] = value
    return entries


def tied_entries(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers, each with the first name.

    Raises:
        ValueError: As `model_entries`.
    """
    entries = model_entries(model)
    named = (model.named_parameters, model.named_buffers)
    found = (pair for each in named for pair in each(remove_duplicate=False))
    places = ((MODEL + _plain_name(model, name), tensor) for name, tensor in found)
    return other_names((key, tensor) for key, tensor in places if key in entries)


def other_names(places: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Map names to the first name of the same place; first names are left out.

    Args:
        places: Names, each with its place: what tied tensors have in common.
    """
    first: dict[Hashable, str] = {}
    kept = {name: first.setdefault(place, name) for name, place in places}
    return {name: other for name, other in kept.items() if other != name}


def is_extra_state(key: str) -> bool:
    """Whether an entry is what a module's `get_extra_state` returned."""
    return key.rpartition(".")[2] == "_extra_state"


def extra_state_names(model: nn.Module) -> dict[str, str]:
    """Names of `get_extra_state` entries in the model's own state dict."""
    names = filter(is_extra_state, model.state_dict())
    return {MODEL + _plain_name(model, name): name for name in names}


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Names of parameters without wrappers; of tied ones the first."""
    return {param: _plain_name(model, name) for name, param in model.named_parameters()}


def state_entries(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """State of an optimizer by parameter, sharing memory with it.

    Raises:
        ValueError: The optimizer steps a parameter that the model does not have, or its state is
            quantized.
    """
    entries: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            of_param = optimizer.state.get(param, {})
            wrap_foreign_state(param, of_param)
            for state, value in of_param.items():
                entries[key := f"{OPTIMIZER_STATE}{_name(names, param)}.{state}"] = value
                local = plain_of(value)
                if is_traceable_wrapper_subclass(local):
                    raise ValueError(
                        f"{key} is a {type(local).__name__}, quantized in blocks of this rank's "
                        "rows, which other ranks cannot load; save optimizer.state_dict() with "
                        "torch.distributed.checkpoint, and load it with the same sharding on as "
                        "many ranks"
                    )
    return entries


def states_by_parameter(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the keys of optimizer state, by parameter and name of the state.

    Args:
        keys: Keys of entries, also of others.
    """
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        if key.startswith(OPTIMIZER_STATE):
            name, _, state = key.removeprefix(OPTIMIZER_STATE).rpartition(".")
            found.setdefault(name, {})[state] = key
    return found


def groups_entry(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Options of an optimizer's groups, with the names of their parameters.

    Raises:
        ValueError: The optimizer steps a parameter that the model does not have.
    """
    return [
        {
            **{k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")},
            "params": [_name(names, param) for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def kind_entry(optimizer: Optimizer) -> dict[str, Any]:
    """Name the class of an optimizer and the options of its constructor.

    Raises:
        ValueError: Its state depends on scales that the optimizer keeps outside of the state.
    """
    # Flat tensors are in no checkpoint.
    kind = optimizer.flat_of if isinstance(optimizer, FlatOptimizer) else type(optimizer)
    # Transformer Engine's FusedAdam, which is not imported here.
    dtypes: Mapping[str, torch.dtype] = getattr(optimizer, "name_to_dtype_map", {})
    scaled = [f"{name} in {dtype}" for name, dtype in dtypes.items() if dtype != torch.float32]
    if scaled:
        raise ValueError(
            f"{kind.__name__} keeps {', '.join(scaled)}, with scales of this rank's rows "
            "outside of its state, which a checkpoint would lose; keep it in torch.float32, or "
            "save the values of its own state_dict() with torch.distributed.checkpoint"
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    return {"class": name, "options": sorted(optimizer.defaults)}


def _name(names: Mapping[nn.Parameter, str], param: nn.Parameter) -> str:
    if param not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not one of the "
            "model; build the optimizer from the parameters the model has after fully_shard"
        )
    return names[param]
