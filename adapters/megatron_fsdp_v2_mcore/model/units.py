"""Which modules of a model chunk become units, over which ranks; what is sharded identically."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

__all__ = [
    "UNIT_CLASSES",
    "PlannedUnit",
    "broadcast_parameters",
    "plan_units",
    "share_late_embeddings",
    "shared_by_stages",
]

UNIT_CLASSES: tuple[type, ...] = (TransformerLayer, MambaLayer)
"""Modules that are gathered on their own; what is left belongs to the root."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A module that becomes a unit.

    Attributes:
        module: The module.
        meshes: Over which ranks.
        strategy: Sharding strategy along the inner axis.
    """

    module: nn.Module
    meshes: Meshes
    strategy: str


def plan_units(
    chunk: nn.Module,
    unit_classes: tuple[type, ...],
    dense: Meshes,
    expert: Meshes | None,
    strategy: str,
    expert_strategy: str,
) -> list[PlannedUnit]:
    """The units of a chunk, inner ones first and the chunk itself last.

    Experts are a unit inside their layer where they are sharded over other ranks or in another
    way; where they are not, they are gathered with the layer.

    Args:
        chunk: The model chunk.
        unit_classes: Classes of layers.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, where there are some.
        strategy: Sharding strategy of dense parameters.
        expert_strategy: Sharding strategy of expert parameters.
    """
    planned = []
    for experts in _experts(chunk):
        is_apart = expert is not None and any(is_expert(param) for param in experts.parameters())
        if is_apart or expert_strategy != strategy:
            meshes = expert if is_apart and expert is not None else dense
            planned.append(PlannedUnit(experts, meshes, expert_strategy))
    planned += [PlannedUnit(layer, dense, strategy) for layer in _outermost(chunk, unit_classes)]
    return [*planned, PlannedUnit(chunk, dense, strategy)]


def _experts(chunk: nn.Module) -> Iterator[nn.Module]:
    for module in chunk.modules():
        if isinstance(module, BaseMoELayer) and isinstance(module.experts, nn.Module):
            yield module.experts


def _outermost(module: nn.Module, classes: tuple[type, ...]) -> list[nn.Module]:
    """Outermost modules of some classes, in the order they are registered."""
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if isinstance(child, classes) else _outermost(child, classes)
    return found


def shared_by_stages(chunk: nn.Module) -> set[nn.Parameter]:
    """Parameters that another pipeline stage holds a copy of.

    Megatron adds up their gradients shard by shard, so both stages have to cut them alike.
    """
    return {param for param in chunk.parameters() if getattr(param, "shared_embedding", False)}


def broadcast_parameters(module: nn.Module, data: Sequence[Any]) -> None:
    """Give every data-parallel rank the first rank's parameters. Collective.

    Args:
        module: Holds parameters that are not sharded yet; those that are, are left alone.
        data: Process groups of the data-parallel axes.
    """
    for param in module.parameters():
        if hasattr(param, "device_mesh") or param.is_meta:
            continue
        for group in data:
            dist.broadcast(param.detach(), dist.get_global_rank(group, 0), group=group)


def share_late_embeddings(chunk: nn.Module, groups: Any) -> None:
    """Have pipeline stages start from one embedding, where it got its values only now. Collective.

    Megatron does this while it builds a model, which is too early on the meta device.

    Args:
        chunk: A sharded chunk, built on the meta device.
        groups: A `ProcessGroupCollection`.

    Raises:
        ValueError: It has no group of the stages that hold the embedding.
    """
    for param in shared_by_stages(chunk):
        if groups.embd is None:
            raise ValueError(
                "pg_collection has no group embd, whose pipeline stages share an embedding; set it"
            )
        local = local_of(param).detach()
        if getattr(param, "shared", False):
            local.zero_()
        if local.numel():
            dist.all_reduce(local, group=groups.embd)
        torch.autograd.graph.increment_version(param)
