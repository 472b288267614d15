"""The units of a model chunk: their modules, meshes and strategies, and shared embeddings."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_fsdp_v2 import group_modules
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.placement import ShardingStrategy
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

UNIT_CLASSES: tuple[type, ...] = (TransformerLayer, MambaLayer)
"""Classes of layers that are units by default."""

LANGUAGE_MODELS: tuple[type, ...] = (GPTModel, HybridModel)
"""Models whose embedding and output layer are units; the root has the remaining parameters."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A module, or several small layers, that become one unit.

    Attributes:
        modules: The modules, in the order of execution.
        meshes: The meshes over which the unit is sharded.
        strategy: Sharding strategy along the inner axis.
        embedding: The tied embedding whose `weight` the unit receives as an argument, if any.
    """

    modules: Sequence[nn.Module]
    meshes: Meshes
    strategy: ShardingStrategy
    embedding: nn.Module | None = None

    @property
    def used_params(self) -> set[nn.Parameter]:
        """Parameters owned by other units that this unit's forward reads."""
        return set() if self.embedding is None else {self.embedding.get_parameter("weight")}


def plan_units(
    chunk: nn.Module,
    unit_classes: tuple[type, ...],
    dense: Meshes,
    expert: Meshes | None,
    strategy: ShardingStrategy,
    expert_strategy: ShardingStrategy,
    max_bytes: int,
    *,
    runs_whole: bool = True,
) -> list[PlannedUnit]:
    """Return the units of a chunk, nested units first and the chunk itself last.

    Embedding and output layer are units because the root's weights stay gathered, and its gradients
    unsharded, during the whole forward and backward. If they are tied, the embedding has the weight
    and the output layer receives it as an argument. Models with multi-token prediction use both
    layers again for each predicted token, and keep them in the root.

    Experts are a unit inside their layer if their mesh or strategy differs from the layer's.
    Otherwise they are gathered with the layer.

    Args:
        chunk: The model chunk.
        unit_classes: Classes of layers.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, if the model has experts.
        strategy: Sharding strategy of dense parameters.
        expert_strategy: Sharding strategy of expert parameters.
        max_bytes: Maximum bytes of parameters of consecutive layers that form one unit.
        runs_whole: Whether modules run as a whole. If a schedule runs parts of them, parameters
            outside layers stay gathered for the whole schedule and belong to the root.
    """
    planned = []
    for experts in _experts(chunk):
        has_own_mesh = any(is_expert(param) for param in experts.parameters())
        meshes = expert if has_own_mesh and expert is not None else dense
        if meshes is expert or expert_strategy != strategy:
            planned.append(PlannedUnit([experts], meshes, expert_strategy))
    # Layers with a nested unit, and layers that a schedule runs in parts, are not grouped.
    groups_layers = runs_whole and not planned
    for layers in _layers(chunk, unit_classes):
        groups = group_modules(layers, max_bytes) if groups_layers else [[one] for one in layers]
        planned += [PlannedUnit(group, dense, strategy) for group in groups]
    in_units = {below for unit in planned for part in unit.modules for below in part.modules()}
    for model in _language_models(chunk) if runs_whole else ():
        if not model.config.mtp_num_layers:
            for part, embedding in _embedding_and_output(model):
                if part not in in_units:
                    planned.append(PlannedUnit([part], dense, strategy, embedding))
    return [*planned, PlannedUnit([chunk], dense, strategy)]


def _language_models(chunk: nn.Module) -> Iterator[Any]:
    return (module for module in chunk.modules() if isinstance(module, LANGUAGE_MODELS))


def _embedding_and_output(model: Any) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield embedding and output layer, each with the module whose weight it receives, or None."""
    embedding, output = (getattr(model, name, None) for name in ("embedding", "output_layer"))
    if isinstance(embedding, nn.Module):
        yield embedding, None
    if isinstance(output, nn.Module):
        # A tied output layer receives the embedding's weight, or has a copy on another stage.
        tied: Any = embedding if model.share_embeddings_and_output_weights else None
        yield output, None if tied is None else tied.word_embeddings


def pass_gathered_weights(chunk: nn.Module) -> None:
    """Make output layers compute with gathered weights if Megatron passes sharded ones.

    Megatron reads the weight of a tied output layer before it calls the layer, when the unit that
    owns the weight is not gathered. One hook replaces the weight with a placeholder before the
    unit's pre-forward hook; a second hook reads the weight after the pre-forward hook gathered it.

    Args:
        chunk: A sharded chunk.
    """
    for model in _language_models(chunk):
        output = getattr(model, "output_layer", None)
        if isinstance(output, nn.Module):
            pass_weight = functools.partial(_pass_gathered_weight, weakref.ref(model))
            output.register_forward_pre_hook(_replace_weight, prepend=True, with_kwargs=True)
            output.register_forward_pre_hook(pass_weight, with_kwargs=True)


class _WeightPlaceholder:
    """Placeholder of a sharded weight.

    Attributes:
        is_trained: Whether the weight requires gradients. MTP heads may use a detached weight.
    """

    def __init__(self, *, is_trained: bool) -> None:
        self.is_trained = is_trained


type _Arguments = tuple[Any, dict[str, Any]]


def _replace_weight(output: nn.Module, args: Any, kwargs: dict[str, Any]) -> _Arguments | None:
    del output
    weight = kwargs.get("weight")
    if not isinstance(weight, UnevenDTensor):
        return None
    return args, {**kwargs, "weight": _WeightPlaceholder(is_trained=weight.requires_grad)}


def _pass_gathered_weight(
    model_ref: weakref.ref[Any], output: Any, args: Any, kwargs: dict[str, Any]
) -> _Arguments | None:
    placeholder, model = kwargs.get("weight"), model_ref()
    if model is None or not isinstance(placeholder, _WeightPlaceholder):
        return None
    is_tied = model.share_embeddings_and_output_weights
    gathered = model.shared_embedding_or_output_weight() if is_tied else output.weight
    return args, {**kwargs, "weight": gathered if placeholder.is_trained else gathered.detach()}


def _experts(chunk: nn.Module) -> Iterator[nn.Module]:
    for module in chunk.modules():
        if isinstance(module, BaseMoELayer) and isinstance(module.experts, nn.Module):
            yield module.experts


def _layers(module: nn.Module, classes: tuple[type, ...]) -> Iterator[list[nn.Module]]:
    """Yield lists of outermost modules of the classes; a `ModuleList` of them is one list."""
    for child in module.children():
        if isinstance(child, classes):
            yield [child]
        elif isinstance(child, nn.ModuleList) and all(isinstance(one, classes) for one in child):
            yield list(child)
        else:
            yield from _layers(child, classes)


def shared_by_stages(chunk: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of which another pipeline stage holds a replica.

    Megatron sums their local gradient shards, so that both stages must shard them identically.
    """
    return {param for param in chunk.parameters() if getattr(param, "shared_embedding", False)}


def all_reduce_embedding_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Megatron's reduction, which assigns a plain tensor to the gradient of a DTensor.

    Both stages shard the embedding identically (see `shared_by_stages`), so that the sum of
    their local shards is the shard of the summed gradient. A stage without a gradient adds zeros,
    as Megatron's DDP does: whether this rank has one must not decide whether it communicates.
    """

    def reduce_grad(
        model: list[Any],
        embd_group: Any,
        pp_group: Any,
        weight_getter: Callable[[Any], Any],
        skip_if_none: bool = True,
        config: Any = None,
    ) -> None:
        if embd_group is None or dist.get_world_size(embd_group) <= 1 or not model:
            return
        if not any(isinstance(param, UnevenDTensor) for param in model[0].parameters()):
            original(model, embd_group, pp_group, weight_getter, skip_if_none, config)
            return
        if dist.get_rank() not in dist.get_process_group_ranks(embd_group):
            return
        chunk = model[0] if is_pp_first_stage(pp_group) else model[-1]
        weight = weight_getter(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))
        # The stages have equal rows, but one of them may have no gradient (--mtp-detach-heads).
        if weight is None or not local_of(weight).numel():
            return
        grad = weight.grad
        if grad is None:
            grad = rows_like(torch.zeros_like(local_of(weight), dtype=weight.grad_dtype), weight)
        dist.all_reduce(local_of(grad), group=embd_group)
        if weight.requires_grad:
            weight.grad = grad
        elif local_of(grad).any():
            raise RuntimeError(
                "the embedding that pipeline stages share is frozen on this stage, and another "
                "stage trains its copy; freeze the copies of all stages, or none"
            )

    return reduce_grad


def broadcast_parameters(modules: Iterable[nn.Module], data: Sequence[Any]) -> None:
    """Broadcast the parameters of the first rank to all data-parallel ranks. Collective.

    For a quantized parameter that kept its high-precision initial values, these values are
    broadcast: main weights start from them, and the parameter is quantized from main weights.

    Args:
        modules: Modules whose parameters are broadcast. Parameters that are already sharded, and
            parameters on the meta device, which are initialized later, are skipped.
        data: Process groups of the data-parallel axes.
    """
    for param in (param for module in modules for param in module.parameters()):
        if hasattr(param, "device_mesh") or param.is_meta:
            continue
        kept = getattr(param, "get_high_precision_init_val", lambda: None)()
        values = param.detach() if kept is None else kept
        # The kept values are in host memory, which NCCL cannot access.
        sent = values.to(param.device)
        for group in data:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        if sent is not values:
            values.copy_(sent)


def synchronize_embeddings(chunk: nn.Module, groups: Any) -> None:
    """Copy a tied embedding from the first stage to the last. Collective.

    Megatron does so during construction; a chunk on the meta device has no values then, and others
    may be loaded later.

    Args:
        chunk: A sharded chunk.
        groups: A `ProcessGroupCollection`.

    Raises:
        ValueError: `groups` has no group of the stages that hold the embedding.
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
