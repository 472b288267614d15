"""What an optimizer's state dict says of parameters of which this rank holds no rows.

An empty shard gets no gradient, so an optimizer neither makes state for it nor moves it on. Its
state dict would then lack tensors that the other ranks have, which torch refuses to load into; or,
once state was loaded, hold a count of steps from then. Of what ranks hold alike a checkpoint keeps
any one rank's, so such a count would replace the right ones. Optimizers that need all ranks step
empty shards with the others, and their state is as it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, override

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.optimizer_kinds import needs_all_ranks
from megatron_fsdp_v2.dtensor.uneven_dtensor import (
    UnevenDTensor,
    local_of,
    plain_attributes,
    with_rows_of,
)

__all__ = [
    "NonOwnedValue",
    "has_no_rows",
    "held_elsewhere",
    "watch_state",
    "wrap_foreign_state",
]


class NonOwnedValue(torch.Tensor):
    """A value that other ranks answer for: torch's checkpoint reads it here and never writes it.

    It is in state dicts only, and a plain tensor in a file and where it becomes state of rows.
    """

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What torch's distributed checkpoint writes for this rank: nothing."""
        del fqn, object
        return []

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> NonOwnedValue:
        copied: NonOwnedValue = self.detach().clone().as_subclass(NonOwnedValue)
        memo[id(self)] = copied
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def wrap_foreign_state(param: torch.Tensor, state: MutableMapping[str, Any]) -> None:
    """Have state that an optimizer wrapped as plain DTensors know which rows it is of.

    Args:
        param: A parameter.
        state: Its state, changed in place; memory stays the same.
    """
    for name, value in state.items():
        known = with_rows_of(value, param)
        if known is not None:
            state[name] = known


def watch_state(optimizer: Optimizer) -> None:
    """Have the state dicts of an optimizer of sharded parameters agree over all ranks."""
    optimizer.register_state_dict_post_hook(_with_state_of_empty_shards)
    optimizer.register_load_state_dict_post_hook(_settle_loaded)
    _settle_loaded(optimizer)


def _settle_loaded(optimizer: Optimizer) -> None:
    """Bring what was loaded to the rows of its parameter.

    Collective where torch distributed whole tensors, which it cuts evenly; all ranks have those.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state.get(param, {})
        wrap_foreign_state(param, state)
        for name, value in state.items():
            if isinstance(value, NonOwnedValue) and not has_no_rows(param):
                state[name] = _plain(value)
            elif _is_cut_otherwise(param, value):
                state[name] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
                state[name].copy_(value)


def _is_cut_otherwise(param: torch.Tensor, value: Any) -> bool:
    if not isinstance(param, UnevenDTensor) or isinstance(value, UnevenDTensor):
        return False
    return isinstance(value, DTensor) and value.shape == param.shape


def _plain(value: torch.Tensor) -> torch.Tensor:
    with plain_attributes():
        return value.as_subclass(torch.Tensor)


def has_no_rows(param: torch.Tensor) -> bool:
    """Whether all rows of a parameter are on other ranks."""
    return isinstance(param, UnevenDTensor) and not local_of(param).numel()


def held_elsewhere(optimizer: Optimizer) -> set[torch.Tensor]:
    """Parameters for whose state other ranks than this one answer: those that hold rows of them.

    Of parameters that nobody has rows of, ranks answer that hold rows of others of their group, or
    else of the optimizer's: a rank that steps nothing has counts of no steps that were made.
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
    """Whether other ranks hold some of these parameters and this one holds none."""
    sized = [param for param in params if param.numel()]
    return bool(sized) and all(has_no_rows(param) for param in sized)


def _with_state_of_empty_shards(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the same entries on all ranks.

    Parameters without rows here get empty tensors, and counts that are those of another parameter
    of their group and are not written to a checkpoint. A hook for
    `Optimizer.register_state_dict_post_hook`; no communication.

    Args:
        optimizer: Whose state dict it is.
        state_dict: What the optimizer made; not changed.
    """
    saved: dict[Any, dict[str, Any]] = {key: dict(v) for key, v in state_dict["state"].items()}
    packed = [group["params"] for group in state_dict["param_groups"]]
    params = {
        key: param
        for group, keys in zip(optimizer.param_groups, packed, strict=True)
        for key, param in zip(keys, group["params"], strict=True)
    }
    for key, param in params.items():
        wrap_foreign_state(param, saved.get(key, {}))
    if needs_all_ranks(type(optimizer)):
        return {**state_dict, "state": saved}
    elsewhere = held_elsewhere(optimizer)
    examples = [
        next((saved[key] for key in keys if key in saved and not has_no_rows(params[key])), {})
        for keys in packed
    ]
    # In the order of parameters: who gathers them does so one after the other on all ranks.
    states: dict[Any, Mapping[str, Any]] = {}
    for keys, own in zip(packed, examples, strict=True):
        # Of a group with no rows here at all, only another group tells what state there is.
        example = own or next(filter(None, examples), {})
        for key in keys:
            state = saved.get(key, {})
            if has_no_rows(params[key]):
                state = _of_empty_shard(params[key], state, example, params[key] in elsewhere)
            if state:
                states[key] = state
    others = {key: state for key, state in saved.items() if key not in params}
    return {**state_dict, "state": {**states, **others}}


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
