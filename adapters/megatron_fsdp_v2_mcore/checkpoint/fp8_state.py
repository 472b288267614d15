"""The state of FP8's delayed scaling in checkpoints: scales and histories of maxima.

Transformer Engine has it in the `_extra_state` of its modules, as pickled bytes, which say nothing
of which expert they are, and must not be unpickled from a file. Here it is saved as plain
tensors under names of the whole model. Tensor- and data-parallel ranks have the same state, for
maxima are reduced over them, so that it loads at any sizes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_context
from torch import nn

from megatron_fsdp_v2_mcore.checkpoint.fp8_names import is_history, state_name
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_modules
from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.formats.products import num_grouped

__all__ = ["allocate", "restore", "saved_tensors", "wanted_tensors"]

_META = "fp8_meta"
"""An attribute that only Transformer Engine's modules have."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of one module's state, or of one of its experts.

    Attributes:
        name: What a checkpoint calls it.
        live: A view of what the module works with.
        owner: The weight it belongs to; None where the module has none.
        group: The ranks whose maxima are reduced, if it is known.
    """

    name: str
    live: torch.Tensor
    owner: nn.Parameter | None
    group: Any


def saved_tensors(
    chunks: Sequence[nn.Module], is_first: Callable[[nn.Parameter], bool]
) -> dict[str, torch.Tensor]:
    """Copies of what this rank is to write. Collective.

    Args:
        chunks: All model chunks of this rank.
        is_first: Whether this rank is the one to write what all holders of a parameter have.
    """
    tensors = list(_tensors(chunks))
    histories = [t for t in tensors if is_history(t.name)]
    # Maxima that were seen since the last reduction, as those of weights that a step has changed
    # and those of an evaluation, are each rank's own. The next reduction takes the largest.
    pending = _reduced(histories)
    copies = {}
    for tensor in tensors:
        if tensor.owner is not None and not is_first(tensor.owner):
            continue
        copies[tensor.name] = copy = tensor.live.detach().clone(
            memory_format=torch.contiguous_format
        )
        if tensor.name in pending:
            copy[0] = pending[tensor.name]
    return copies


def allocate(chunks: Sequence[nn.Module]) -> None:
    """Have modules make the state that their first forward would make, to be loaded into."""
    for chunk in chunks:
        modules = [module for module in chunk.modules() if hasattr(module, _META)]
        config = next((m.config for m in chunk.modules() if hasattr(m, "config")), None)
        if not modules or not _is_delayed(config):
            continue
        with torch.no_grad(), get_fp8_context(config):
            for module in modules:
                _formats().allocate(module)


def wanted_tensors(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Memory for what this rank reads, by name, as far as modules have state."""
    return {t.name: torch.empty_like(t.live).contiguous() for t in _tensors(chunks)}


def restore(chunks: Sequence[nn.Module], read: Mapping[str, torch.Tensor]) -> None:
    """Put what was read where modules have it. Collective.

    Args:
        chunks: As when it was asked for.
        read: By name; what is not there stays as it is.

    Raises:
        FlagError: A scale that was read is none, on some rank; on all of them. Nothing is changed.
    """
    tensors = [tensor for tensor in _tensors(chunks) if tensor.name in read]
    bad = [tensor.name for tensor in tensors if not _is_valid(tensor.name, read[tensor.name])]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, bad[:1])
    first = next((names[0] for names in found if names), None)
    if first is not None:
        raise FlagError(
            f"the checkpoint is damaged: model.{first} holds what cannot be a scale or the "
            "largest magnitude of anything; load another checkpoint"
        )
    with torch.no_grad():
        for tensor in tensors:
            tensor.live.copy_(read[tensor.name])


def _is_valid(name: str, value: torch.Tensor) -> bool:
    # Maxima may be infinite, and not a number, where a step overflowed; such scales never are.
    if is_history(name):
        return not bool((value < 0).any())
    return bool((value.isfinite() & (value > 0)).all())


def _is_delayed(config: Any) -> bool:
    """Whether modules are going to keep state. FP8 attention does with other recipes as well."""
    if not getattr(config, "fp8", None):
        return False
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    return recipe == "delayed" or any(
        getattr(config, f"fp8_{kind}_attention", False) for kind in ("dot_product", "multi_head")
    )


def _formats() -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.formats.delayed_scaling")


def _tensors(chunks: Sequence[nn.Module]) -> Iterator[_Tensor]:
    """The state of all modules of this rank."""
    for module, renamed in canonical_modules(chunks):
        if not hasattr(module, _META):
            continue
        state = _formats().live_state(module)
        group = _formats().amax_group(module)
        number = num_grouped(module)
        for what, tensor in state.items():
            for expert in [None] if number is None else range(number):
                live = tensor
                if expert is not None:
                    per_expert = tensor.shape[-1] // number
                    live = tensor.narrow(-1, expert * per_expert, per_expert)
                name = renamed(state_name(what, expert))
                yield _Tensor(name, live, _owner(module, expert), group)


def _owner(module: nn.Module, expert: int | None) -> nn.Parameter | None:
    own = module._parameters
    weight = None if expert is None else own.get(f"weight{expert}")
    return weight if weight is not None else next((p for p in own.values() if p is not None), None)


def _reduced(histories: Sequence[_Tensor]) -> dict[str, torch.Tensor]:
    """The newest row of histories, each with the largest of all ranks. Collective."""
    groups = {id(t.group): t.group for t in histories if t.group is not None}
    result: dict[str, torch.Tensor] = {}
    for identity, group in groups.items():
        own = [tensor for tensor in histories if id(tensor.group) == identity]
        rows = [tensor.live[0].detach() for tensor in own]
        flat = torch.cat(rows)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        names = [tensor.name for tensor in own]
        result.update(zip(names, torch.split(flat, [len(row) for row in rows]), strict=True))
    return result
