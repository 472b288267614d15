"""Empty gradients during steps of optimizers, and sharded tensors in state dicts of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.optimizer_kinds import finds_no_empty_gradients
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, with_rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor


def has_no_rows(param: torch.Tensor) -> bool:
    """Return whether a sharded parameter has no rows on this rank."""
    return isinstance(param, UnevenDTensor) and not local_of(param).numel()


def hide_empty_gradients(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Set gradients of parameters without rows on this rank to None.

    Returns:
        The parameters and their gradients, for `restore_gradients`.
    """
    hidden = [(p, p.grad) for p in params if has_no_rows(p) and p.grad is not None]
    for param, _ in hidden:
        param.grad = None
    return hidden


def restore_gradients(hidden: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Set the gradients that `hide_empty_gradients` returned."""
    for param, grad in hidden:
        param.grad = grad


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
    optimizer.register_state_dict_post_hook(_complete_state)
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
            if is_sharded and type(value) is DTensor and value.shape == param.shape:
                state[name] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
                state[name].copy_(value)
        if finds_no_empty_gradients(type(optimizer)) and has_no_rows(param):
            # No step would update it.
            optimizer.state.pop(param, None)


def _complete_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the same entries on all ranks.

    An optimizer that finds no empty gradients has no state of parameters without rows on this rank.
    They get empty tensors, and other values of another parameter. No communication.

    Args:
        optimizer: Optimizer of the state dict.
        state_dict: State dict of the optimizer; not changed.
    """
    saved: dict[Any, dict[str, Any]] = {key: dict(v) for key, v in state_dict["state"].items()}
    pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    groups = [list(zip(packed["params"], group["params"], strict=True)) for packed, group in pairs]
    for key, param in itertools.chain(*groups):
        wrap_foreign_state(param, saved.get(key, {}))
    if not finds_no_empty_gradients(type(optimizer)):
        return {**state_dict, "state": saved}
    # In the order of parameters, so that all ranks gather them in the same order.
    states: dict[Any, Mapping[str, Any]] = {}
    for group in groups:
        # If this rank has no rows of a group, the state of another group.
        example = next((saved[key] for key, _ in group if key in saved), None)
        example = example or next(iter(saved.values()), {})
        for key, param in group:
            if key in saved:
                states[key] = saved[key]
            elif example and param.requires_grad and has_no_rows(param):
                states[key] = {name: _empty(value, param) for name, value in example.items()}
    return {**state_dict, "state": {**states, **saved}}


def _empty(value: Any, param: torch.Tensor) -> Any:
    if isinstance(value, UnevenDTensor):
        return torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
    return value.clone() if isinstance(value, torch.Tensor) else value
