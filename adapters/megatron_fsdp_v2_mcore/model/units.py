"""Which modules of a model chunk become units, over which ranks; what is sharded identically."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

__all__ = [
    "UNIT_CLASSES",
    "PlannedUnit",
    "broadcast_parameters",
    "hand_gathered_weights",
    "plan_units",
    "share_late_embeddings",
    "shared_by_stages",
]

UNIT_CLASSES: tuple[type, ...] = (TransformerLayer, MambaLayer)
"""Layers, which are gathered on their own."""

LANGUAGE_MODELS: tuple[type, ...] = (GPTModel, HybridModel)
"""Models whose embedding and output layer are as well; what is left belongs to the root."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A module that becomes a unit.

    Attributes:
        module: The module.
        meshes: Over which ranks.
        strategy: Sharding strategy along the inner axis.
        uses: A module whose `weight` it is handed, and has not: that of an embedding that is tied.
    """

    module: nn.Module
    meshes: Meshes
    strategy: str
    uses: nn.Module | None = None

    @property
    def used_params(self) -> set[nn.Parameter]:
        """What is gathered for it although it has it not, as it is now."""
        return set() if self.uses is None else {self.uses.get_parameter("weight")}


def plan_units(
    chunk: nn.Module,
    unit_classes: tuple[type, ...],
    dense: Meshes,
    expert: Meshes | None,
    strategy: str,
    expert_strategy: str,
    *,
    runs_whole: bool = True,
) -> list[PlannedUnit]:
    """The units of a chunk, inner ones first and the chunk itself last.

    Embedding and output layer are units, since the root's weights stay gathered, and its gradients
    whole, while anything computes. Tied, the one has the weight and the other is handed it. Models
    that predict further tokens use both again for each, and keep them in the root.

    Experts are a unit inside their layer where they are sharded over other ranks or in another
    way; where they are not, they are gathered with the layer.

    Args:
        chunk: The model chunk.
        unit_classes: Classes of layers.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, where there are some.
        strategy: Sharding strategy of dense parameters.
        expert_strategy: Sharding strategy of expert parameters.
        runs_whole: Whether modules run as a whole. Where a schedule runs parts of them, what is no
            layer is gathered throughout, and is left to the root.
    """
    planned = []
    for experts in _experts(chunk):
        is_apart = expert is not None and any(is_expert(param) for param in experts.parameters())
        if is_apart or expert_strategy != strategy:
            meshes = expert if is_apart and expert is not None else dense
            planned.append(PlannedUnit(experts, meshes, expert_strategy))
    planned += [PlannedUnit(layer, dense, strategy) for layer in _outermost(chunk, unit_classes)]
    inside = {id(below) for unit in planned for below in unit.module.modules()}
    for model in chunk.modules() if runs_whole else ():
        config: Any = getattr(model, "config", None)
        if isinstance(model, LANGUAGE_MODELS) and not config.mtp_num_layers:
            for part, uses in _ends(model):
                if id(part) not in inside:
                    planned.append(PlannedUnit(part, dense, strategy, uses))
    return [*planned, PlannedUnit(chunk, dense, strategy)]


def _language_models(chunk: nn.Module) -> Iterator[Any]:
    return (module for module in chunk.modules() if isinstance(module, LANGUAGE_MODELS))


def _ends(model: Any) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Embedding and output layer of a model, as far as it has them, with what they are handed."""
    embedding, output = (getattr(model, name, None) for name in ("embedding", "output_layer"))
    if isinstance(embedding, nn.Module):
        yield embedding, None
    if isinstance(output, nn.Module):
        # Tied, it is handed the weight of the embedding, or has a copy where there is none.
        handed: Any = embedding if model.share_embeddings_and_output_weights else None
        yield output, None if handed is None else handed.word_embeddings


def hand_gathered_weights(chunk: nn.Module) -> None:
    """Have output layers compute with gathered weights, whatever they are handed.

    Megatron looks the weight of a tied output layer up before it calls the layer, when the unit
    that has it is not gathered. So it is put aside before the unit sees the layer's arguments, and
    looked up again once that has gathered.

    Args:
        chunk: A sharded chunk.
    """
    for model in _language_models(chunk):
        output = getattr(model, "output_layer", None)
        if isinstance(output, nn.Module):
            hand = functools.partial(_hand_gathered_weight, weakref.ref(model))
            output.register_forward_pre_hook(_put_weight_aside, prepend=True, with_kwargs=True)
            output.register_forward_pre_hook(hand, with_kwargs=True)


class _PutAside:
    """Stands for a sharded weight.

    Attributes:
        is_trained: Whether gradients go to it. Heads for further tokens may be told not to.
    """

    def __init__(self, *, is_trained: bool) -> None:
        self.is_trained = is_trained


type _Arguments = tuple[Any, dict[str, Any]]


def _put_weight_aside(output: nn.Module, args: Any, kwargs: dict[str, Any]) -> _Arguments | None:
    del output
    weight = kwargs.get("weight")
    if not isinstance(weight, UnevenDTensor):
        return None
    return args, {**kwargs, "weight": _PutAside(is_trained=weight.requires_grad)}


def _hand_gathered_weight(
    model_ref: weakref.ref[Any], output: Any, args: Any, kwargs: dict[str, Any]
) -> _Arguments | None:
    aside, model = kwargs.get("weight"), model_ref()
    if model is None or not isinstance(aside, _PutAside):
        return None
    is_tied = model.share_embeddings_and_output_weights
    gathered = model.shared_embedding_or_output_weight() if is_tied else output.weight
    return args, {**kwargs, "weight": gathered if aside.is_trained else gathered.detach()}


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

    Of a quantized parameter these are the values it was quantized from, if it kept them: main
    weights start with them, and its bytes are quantized from main weights.

    Args:
        module: Holds parameters that are not sharded yet; those that are, are left alone, and so
            are those on the meta device, which get their values later.
        data: Process groups of the data-parallel axes.
    """
    for param in module.parameters():
        if hasattr(param, "device_mesh") or param.is_meta:
            continue
        kept = getattr(param, "get_high_precision_init_val", lambda: None)()
        values = param.detach() if kept is None else kept
        # What is kept is in host memory, where NCCL does not reach it.
        sent = values.to(param.device)
        for group in data:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        if sent is not values:
            values.copy_(sent)


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
