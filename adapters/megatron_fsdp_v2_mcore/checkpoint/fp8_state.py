"""The state of FP8's delayed scaling in checkpoints: scales and amax histories.

Transformer Engine stores this state in the `_extra_state` of its modules, as pickled bytes that do
not identify experts and that must not be unpickled from a file. Here the state is saved as plain
tensors under global names. Tensor- and data-parallel ranks have the same state, since amaxes are
reduced over them, so that it loads at all parallel sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_context
from torch import nn

from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2_mcore.checkpoint.name_table import is_history, state_name
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_modules
from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.formats import delayed_scaling


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A tensor in the state of a module, or of one of its experts.

    Attributes:
        name: Name in the checkpoint.
        live: A view of the tensor that the module uses.
        owner: The weight to which the tensor belongs; None if the module has no weights.
        group: The group over which amaxes are reduced, if known.
    """

    name: str
    live: torch.Tensor
    owner: nn.Parameter | None
    group: Any


def tensors_to_save(
    chunks: Sequence[nn.Module], writes_replicated: Callable[[nn.Parameter], bool]
) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that this rank writes. Collective.

    Args:
        chunks: All model chunks of this rank.
        writes_replicated: Whether this rank writes the replicated values of a parameter.
    """
    tensors = list(_tensors(chunks))
    histories = [t for t in tensors if is_history(t.name)]
    # Amaxes since the last reduction, such as those of an evaluation or of updated weights, differ
    # between ranks. The next reduction would take their maximum.
    pending = _reduce_newest_amaxes(histories)
    copies = {}
    for tensor in tensors:
        if tensor.owner is not None and not writes_replicated(tensor.owner):
            continue
        copy = tensor.live.detach().clone(memory_format=torch.contiguous_format)
        if tensor.name in pending:
            copy[0] = pending[tensor.name]
        copies[tensor.name] = copy
    return copies


def allocate(chunks: Sequence[nn.Module]) -> None:
    """Allocate the FP8 state into which a checkpoint is loaded, as the first forward would do."""
    for chunk in chunks:
        modules = [m for m in chunk.modules() if delayed_scaling.has_fp8_state(m)]
        config = next((m.config for m in chunk.modules() if hasattr(m, "config")), None)
        if not modules or not _is_delayed(config):
            continue
        with torch.no_grad(), get_fp8_context(config):
            for module in modules:
                delayed_scaling.allocate(module)


def tensors_to_load(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return empty tensors for the state that this rank reads, by name."""
    return {t.name: torch.empty_like(t.live).contiguous() for t in _tensors(chunks)}


def restore(chunks: Sequence[nn.Module], read: Mapping[str, torch.Tensor]) -> None:
    """Copy state from a checkpoint into modules. Collective.

    Args:
        chunks: The model chunks for which the state was requested.
        read: Tensors of the checkpoint by name. State without a tensor is not changed.

    Raises:
        FlagError: A value on some rank is not a valid scale or amax. Raised on all ranks; nothing
            is changed.
    """
    tensors = [tensor for tensor in _tensors(chunks) if tensor.name in read]
    bad = [tensor.name for tensor in tensors if not _is_valid(tensor.name, read[tensor.name])]
    first = next((names[0] for names in everyones(bad[:1]) if names), None)
    if first is not None:
        raise FlagError(
            f"the checkpoint is damaged: model.{first} contains invalid scales or amaxes; load "
            "another checkpoint"
        )
    with torch.no_grad():
        for tensor in tensors:
            tensor.live.copy_(read[tensor.name])


def _is_valid(name: str, value: torch.Tensor) -> bool:
    # Amaxes may be infinite or NaN after an overflow; scales never are.
    if is_history(name):
        return not bool((value < 0).any())
    return bool((value.isfinite() & (value > 0)).all())


def _is_delayed(config: Any) -> bool:
    """Whether modules will keep state. FP8 attention keeps state with every recipe."""
    if not getattr(config, "fp8", None):
        return False
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    return recipe == "delayed" or any(
        getattr(config, f"fp8_{kind}_attention", False) for kind in ("dot_product", "multi_head")
    )


def _tensors(chunks: Sequence[nn.Module]) -> Iterator[_StateTensor]:
    """Yield the state tensors of all modules of this rank."""
    for module, to_global in canonical_modules(chunks):
        if not delayed_scaling.has_fp8_state(module):
            continue
        group = delayed_scaling.amax_group(module)
        number = delayed_scaling.num_grouped_gemms(module)
        for what, tensor in delayed_scaling.live_state(module).items():
            parts = [(None, tensor)] if number is None else enumerate(tensor.chunk(number, dim=-1))
            for expert, live in parts:
                name = to_global(state_name(what, expert))
                yield _StateTensor(name, live, _owner(module, expert), group)


def _owner(module: nn.Module, expert: int | None) -> nn.Parameter | None:
    own = module._parameters
    weight = None if expert is None else own.get(f"weight{expert}")
    return weight if weight is not None else next((p for p in own.values() if p is not None), None)


def _reduce_newest_amaxes(histories: Sequence[_StateTensor]) -> dict[str, torch.Tensor]:
    """Return the newest row of each history, reduced by maximum over ranks. Collective."""
    result: dict[str, torch.Tensor] = {}
    for group in dict.fromkeys(t.group for t in histories if t.group is not None):
        own = [tensor for tensor in histories if tensor.group is group]
        rows = [tensor.live[0].detach() for tensor in own]
        flat = torch.cat(rows)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        names = [tensor.name for tensor in own]
        result.update(zip(names, torch.split(flat, [len(row) for row in rows]), strict=True))
    return result
