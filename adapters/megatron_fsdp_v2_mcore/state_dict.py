"""Megatron's `fsdp_dtensor` state dicts, where uneven DTensors need something else than its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fsdp_v2.uneven_dtensor import UnevenDTensor

__all__ = ["chunk_metadata", "split_swiglu"]

_FC1 = re.compile(r"(?:^|.*\.)mlp\.(?:.*\.)?linear_fc1\.(?:weight|bias)\d*$")


def chunk_metadata(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace Megatron's gathering of chunk metadata.

    An `UnevenDTensor` knows its rows on every rank. Megatron would ask all ranks, tensor by
    tensor; a parameter that is empty here has no optimizer state here, so that the ranks would
    not even ask about the same tensors.
    """

    def preprocess(state_dict: Any) -> Any:
        if any(isinstance(value, UnevenDTensor) for value in _leaves(state_dict)):
            return state_dict
        return original(state_dict)

    return preprocess


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def split_swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's split of SwiGLU's fused first layer into `_w` and `_v`.

    Megatron computes it from attributes its own buffers leave on parameters; rows are enough.
    """

    def split(model: Any, model_state: dict[str, Any], optimizer_state: Any) -> Any:
        if not any(isinstance(value, UnevenDTensor) for value in model_state.values()):
            return original(model, model_state, optimizer_state)
        gated = _gated_layers(model)
        new_model = _split_entries(model_state, gated)
        if optimizer_state:
            optimizer_state = dict(optimizer_state)
            state = {}
            for name, entry in optimizer_state["state"].items():
                if _is_gated_fc1(name, gated) and isinstance(entry, dict):
                    state.update(_split_state(name, entry))
                else:
                    state[name] = entry
            optimizer_state["state"] = state
        return new_model, optimizer_state

    return split


def _gated_layers(model: torch.nn.Module) -> dict[str, bool]:
    return {
        _strip(name): bool(module.config.gated_linear_unit)
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }


def _strip(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _is_gated_fc1(name: str, gated: dict[str, bool]) -> bool:
    bare = _strip(name)
    if not _FC1.match(bare):
        return False
    layers = [layer for layer in gated if bare.startswith(f"{layer}.")]
    return gated[max(layers, key=len)] if layers else True


def _split_entries(state: dict[str, Any], gated: dict[str, bool]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, UnevenDTensor) and _is_gated_fc1(name, gated):
            result[f"{name}_w"], result[f"{name}_v"] = _halves(value)
        else:
            result[name] = value
    return result


def _split_state(name: str, entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    halves: dict[str, dict[str, Any]] = {f"{name}_w": {}, f"{name}_v": {}}
    for key, value in entry.items():
        both = _halves(value) if isinstance(value, UnevenDTensor) else (value, value)
        halves[f"{name}_w"][key], halves[f"{name}_v"][key] = both
    return halves


def _halves(tensor: UnevenDTensor) -> tuple[UnevenDTensor, UnevenDTensor]:
    rows = tensor.shape[0]
    if rows % 2:
        raise ValueError(f"a gated layer has an even number of rows, got {rows}")
    return tensor.narrow_rows(0, rows // 2), tensor.narrow_rows(rows // 2, rows)
