"""Optimizer state dicts of parameters whose rows are all on other ranks.

An empty shard has no gradient, so an elementwise optimizer neither creates nor updates its state.
The state dict would lack tensors that other ranks have, which torch refuses to load into, or hold
an outdated step count after a load. A checkpoint keeps one rank's copy of a replicated value, so an
outdated count could replace the right one. Optimizers that need all ranks step empty shards too,
and their state is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, override

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.optimizer_kinds import needs_all_ranks
from megatron_fsdp_v2.dtensor.sharded_rows import with_rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of, plain_attributes

__all__ = ["has_no_rows", "saved_by_other_ranks", "watch_state", "wrap_foreign_state"]


class NonOwnedValue(torch.Tensor):
    """A value that another rank saves: torch's checkpoint loads into it and does not write it.

    It occurs in state dicts only; files and the state of parameters with rows hold plain tensors.
    """

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return no write items: torch's distributed checkpoint writes nothing for this rank."""
        del fqn, object
        return []

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.detach().clone().as_subclass(NonOwnedValue))

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def wrap_foreign_state(param: torch.Tensor, state: MutableMapping[str, Any]) -> None:
    """Replace plain DTensors in an optimizer's state by sharded tensors with the parameter's rows.

    Args:
        param: A parameter.
        state: Its state, changed in place. Tensors keep their memory.
    """
    for name, value in state.items():
        known = with_rows_of(value, param)
        if known is not None:
            state[name] = known


def watch_state(optimizer: Optimizer) -> None:
    """Register hooks that make an optimizer's state dicts have the same entries on all ranks."""
    optimizer.register_state_dict_post_hook(_with_state_of_empty_shards)
    optimizer.register_load_state_dict_post_hook(_convert_loaded_state)
    _convert_loaded_state(optimizer)


def _convert_loaded_state(optimizer: Optimizer) -> None:
    """Convert loaded state to the rows of its parameter.

    Collective for tensors that torch distributed into even chunks, which all ranks have.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state, is_sharded = optimizer.state.get(param, {}), isinstance(param, UnevenDTensor)
        wrap_foreign_state(param, state)
        for name, value in state.items():
            if isinstance(value, NonOwnedValue) and not has_no_rows(param):
                state[name] = _plain(value)
            elif is_sharded and type(value) is DTensor and value.shape == param.shape:
                state[name] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
                state[name].copy_(value)


def _plain(value: torch.Tensor) -> torch.Tensor:
    with plain_attributes():
        return value.as_subclass(torch.Tensor)


def has_no_rows(param: torch.Tensor) -> bool:
    """Return whether a sharded parameter has no rows on this rank."""
    return isinstance(param, UnevenDTensor) and not local_of(param).numel()


def saved_by_other_ranks(optimizer: Optimizer) -> set[torch.Tensor]:
    """Return the parameters whose state is saved by other ranks, which hold their rows.

    The state of a parameter without elements is saved by ranks that hold rows of other parameters
    of its group, or else of the optimizer: a rank that steps nothing has no valid step count.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    steps_nothing = _steps_nothing([param for group in groups for param in group])
    found: set[torch.Tensor] = set()
    for group in groups:
        is_empty = not any(param.numel() for param in group)
        is_idle = steps_nothing if is_empty else _steps_nothing(group)
        found.update(p for p in group if has_no_rows(p) and (is_idle or p.numel()))
    return found


def _steps_nothing(params: Sequence[torch.Tensor]) -> bool:
    """Return whether other ranks hold rows of these parameters and this rank holds none."""
    sized = [param for param in params if param.numel()]
    return bool(sized) and all(has_no_rows(param) for param in sized)


def _with_state_of_empty_shards(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the same entries on all ranks.

    Parameters without rows on this rank get empty tensors, and the step count of another parameter
    of their group, which a checkpoint does not write. A hook for
    `Optimizer.register_state_dict_post_hook`; no communication.

    Args:
        optimizer: Optimizer of the state dict.
        state_dict: State dict of the optimizer; not changed.
    """
    saved: dict[Any, dict[str, Any]] = {key: dict(v) for key, v in state_dict["state"].items()}
    pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    groups = [list(zip(packed["params"], group["params"], strict=True)) for packed, group in pairs]
    for key, param in itertools.chain(*groups):
        wrap_foreign_state(param, saved.get(key, {}))
    if needs_all_ranks(type(optimizer)):
        return {**state_dict, "state": saved}
    elsewhere = saved_by_other_ranks(optimizer)
    examples = [
        next((saved[key] for key, param in group if key in saved and not has_no_rows(param)), {})
        for group in groups
    ]
    # In the order of parameters, so that all ranks gather them in the same order.
    states: dict[Any, Mapping[str, Any]] = {}
    for group, own in zip(groups, examples, strict=True):
        # If this rank has no rows of a group, use the names of another group's state.
        example = own or next(filter(None, examples), {})
        for key, param in group:
            state = saved.pop(key, {})
            if has_no_rows(param):
                state = _of_empty_shard(param, state, example, param in elsewhere)
            if state:
                states[key] = state
    return {**state_dict, "state": {**states, **saved}}


def _of_empty_shard(
    param: torch.Tensor, mine: Mapping[str, Any], example: Mapping[str, Any], is_elsewhere: bool
) -> dict[str, Any]:
    names = mine.keys() or (example.keys() if param.requires_grad else ())
    state: dict[str, Any] = {}
    for name in names:
        value = mine.get(name, example.get(name))
        if isinstance(value, UnevenDTensor):
            own = mine.get(name)
            state[name] = torch.zeros_like(param, dtype=value.dtype) if own is None else own
        elif isinstance(value, torch.Tensor):
            copied = example.get(name, value).detach().clone()
            state[name] = copied.as_subclass(NonOwnedValue) if is_elsewhere else copied
    return state
