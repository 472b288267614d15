"""Builds the model of Megatron's flags on the meta device and describes it for a plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, override

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.training import training
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.plan.description import (
    DATA,
    MeshDescription,
    ModelTraits,
    PayloadBytes,
    Strategy,
    TrainingDescription,
    UnitDescription,
    describe_module,
)
from megatron_fsdp_v2.plan.sources import SourceResult
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.precision import state_dtypes
from megatron_fsdp_v2_mcore.flags.settings import sharding_settings
from megatron_fsdp_v2_mcore.model.mamba_parameters import use_registered_parameters
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert
from megatron_fsdp_v2_mcore.model.units import UNIT_CLASSES, plan_units, shared_by_stages
from megatron_fsdp_v2_mcore.plan.costs import Costs
from megatron_fsdp_v2_mcore.pretrain_gpt.gpt import build_model

EXPERT = "expert dp"
"""Name of the mesh of experts."""


def describe_training(args: Any, *, keeps_attention: bool) -> SourceResult:
    """Describe a training: one part for the first rank of each pipeline stage.

    Args:
        args: Megatron's arguments, which must also be set in Megatron's global variables.
        keeps_attention: Whether the attention matrix is kept for the backward.
    """
    options, config = Options.from_args(args), training.get_megatron_ddp_config(args)
    gathered_dtype = torch.uint8 if args.plans_quantized else args.params_dtype
    settings = sharding_settings(config, options, args.params_dtype, gathered_dtype)
    instances = args.num_distributed_optimizer_instances
    strategy = Strategy(
        config.data_parallel_sharding_strategy,
        config.outer_dp_sharding_strategy,
        instances if instances > 1 else None,
        () if options.expert_strategy is None else ((EXPERT, options.expert_strategy),),
    )
    samples = args.micro_batch_size * args.data_parallel_size
    common: dict[str, Any] = dict(
        meshes=_meshes(args),
        policy=settings.policy,
        optimizer=args.optimizer,
        optimizer_dtype=state_dtypes(args) if args.use_precision_aware_optimizer else None,
        offload_fraction=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        matrix_dtype=settings.policy.main_params_dtype or args.params_dtype,
        # As in `ShardedMatrixStep`, whose module needs emerging_optimizers.
        spreads_replicated=False,
        num_microbatches=args.global_batch_size // samples,
        syncs_afterwards=not config.overlap_grad_reduce,
        options=settings.runtime,
        stages=args.pipeline_model_parallel_size,
        recompute_factor=1.0 if args.recompute_granularity == "full" else 0.0,
    )
    described = []
    for stage in range(args.pipeline_model_parallel_size):
        chunks = build_stage(args, stage)
        is_last = stage == args.pipeline_model_parallel_size - 1
        parts = []
        for chunk in chunks:
            costs = Costs(args, is_last and chunk is chunks[-1], keeps_attention)
            parts.append(_Chunk(args, chunk, strategy, settings.unit_bytes, costs))
        described.append(_stage(args, stage, parts, common))
    return SourceResult(tuple(described), strategy)


def _meshes(args: Any) -> dict[str, MeshDescription]:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    meshes = {DATA: MeshDescription(args.world_size // (tensor * pipeline), tensor)}
    if args.num_experts:
        stride = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
        meshes[EXPERT] = MeshDescription(args.world_size // (stride * pipeline), stride)
    return meshes


def _stage(
    args: Any, stage: int, chunks: Sequence[_Chunk], common: dict[str, Any]
) -> TrainingDescription:
    """Describe the training of the first rank of a pipeline stage."""
    num_stages, overlaps = common["stages"], args.overlap_moe_expert_parallel_comm
    # With overlapped experts, pipeline stages begin one more forward before the first backward.
    ahead = 1 if overlaps and num_stages > 1 else 0
    in_flight = min(num_stages - stage + ahead, common["num_microbatches"])
    layers = [has_experts for chunk in chunks for has_experts in chunk.layers.values()]
    units: list[UnitDescription] = []
    plain_nbytes = 0
    for number, chunk in enumerate(chunks):
        found, buffers = chunk.describe()
        units += _prefix_names(found, number) if len(chunks) > 1 else found
        plain_nbytes += buffers
    if len(chunks) > 1:
        # Each chunk has a root. A description has one root, which has no parameters here.
        units.insert(0, UnitDescription("", ()))
    costs = chunks[-1].costs
    return TrainingDescription(
        units=tuple(units),
        plain_nbytes=plain_nbytes,
        tokens=costs.tokens,
        num_in_flight=in_flight,
        # A layer without experts stays gathered from its attention to its MLP.
        num_extra_gathered=1 if overlaps and not all(layers) else 0,
        num_chunks=len(chunks),
        alternatives=costs.alternatives(layers, in_flight),
        label=f"stage {stage} of {num_stages}" if num_stages > 1 else "",
        notes=tuple(_notes(args, len(chunks))),
        **common,
    )


def _notes(args: Any, num_chunks: int) -> Iterator[str]:
    """Yield notes on the accuracy of the plan."""
    tensor = args.tensor_model_parallel_size
    yield "activations and operations are estimates by formula (Korthikanti et al. 2022)"
    if max(tensor, args.pipeline_model_parallel_size, args.expert_model_parallel_size) > 1:
        yield "the time does not include communication of tensor, pipeline and expert parallelism"
    if tensor > 1 and "muon" in args.optimizer and args.muon_tp_mode != "blockwise":
        yield "matrices that are assembled from tensor-parallel shards are counted shard by shard"
    if args.recompute_granularity == "full" and (args.recompute_num_layers or 1) > 2:
        yield "layers that are recomputed together are gathered more often than counted"
    if args.overlap_moe_expert_parallel_comm:
        yield (
            "overlapping micro-batches: the root is counted as gathered for each of them and is "
            "gathered once; the time does not include the overlap"
        )
    if num_chunks > 1:
        yield "virtual pipeline stages: counts of collectives and times are estimates"


class _Chunk:
    """A model chunk on the meta device, and the units that `FullyShardedDataParallel` creates.

    Attributes:
        costs: Activations and operations of its layers.
        layers: Names of its layers, with whether a layer has experts.
    """

    def __init__(
        self, args: Any, chunk: nn.Module, strategy: Strategy, unit_bytes: int, costs: Costs
    ) -> None:
        self._args, self._chunk, self._strategy = args, chunk, strategy
        self._unit_bytes = unit_bytes
        self.costs = costs
        self.layers = {
            name: any(isinstance(part, BaseMoELayer) for part in module.modules())
            for name, module in chunk.named_modules()
            if issubclass(type(module), UNIT_CLASSES)
        }

    def describe(self) -> tuple[list[UnitDescription], int]:
        """Return the units, and the bytes of the chunk's buffers."""
        args, chunk, inner = self._args, self._chunk, self._strategy.inner
        use_registered_parameters(chunk)
        # Only the identity of the meshes matters here.
        dense, expert = (Meshes(cast("Any", None), None) for _ in range(2))
        planned = plan_units(
            chunk,
            UNIT_CLASSES,
            dense,
            expert if any(is_expert(param) for param in chunk.parameters()) else None,
            inner,
            self._strategy.inner_of(EXPERT),
            self._unit_bytes,
            runs_whole=not args.overlap_moe_expert_parallel_comm,
        )
        of_experts = {
            module
            for unit in planned
            for module in unit.modules
            if unit.meshes is expert or unit.strategy != inner
        }
        quantized = set(self._quantized()) if args.plans_quantized else set()
        uses: tuple[WeightUse, ...] = (WeightUse.BOTH,)
        if args.fp8_recipe == "mxfp8" and not args.plans_fp4:
            uses = (WeightUse.FORWARD, WeightUse.BACKWARD)
        payload = PayloadBytes(1, uses, is_kept=True, packing=2 if args.plans_fp4 else 1)
        traits = ModelTraits(
            mesh_of=lambda unit: EXPERT if unit in of_experts else DATA,
            is_matrix=lambda unit, param: _is_matrix(param),
            separate=shared_by_stages(chunk),
            used={module: unit.used_params for unit in planned for module in unit.modules},
            flops_of=self.costs.flops,
            payload_of=lambda unit, param: payload if param in quantized else None,
        )
        modules = [module for unit in planned for module in unit.modules]
        units, plain_nbytes = describe_module(chunk, modules, traits)
        described = {unit.name: self._with_activations(unit) for unit in units}
        names = {module: name for name, module in chunk.named_modules()}
        for unit in planned:
            first, *others = [names[module] for module in unit.modules]
            if others:
                parts = [described[first], *(described.pop(name) for name in others)]
                described[first] = _merge_units(parts)
        return list(described.values()), plain_nbytes

    def _with_activations(self, unit: UnitDescription) -> UnitDescription:
        nbytes = 0 if unit.name else self.costs.root_activations()
        if unit.name in self.layers:
            nbytes = self.costs.layer_activations(has_experts=self.layers[unit.name])
        return replace(unit, activation_nbytes=nbytes)

    def _quantized(self) -> Iterator[nn.Parameter]:
        """Yield the layers' parameters that Transformer Engine quantizes: the weights of GEMMs."""
        for name in self.layers:
            layer: Any = self._chunk.get_submodule(name)
            number = getattr(layer, "layer_number", None)
            if number is not None and is_first_last_bf16_layer(self._args, number - 1):
                continue
            for part in layer.modules():
                is_linear = isinstance(part, ColumnParallelLinear | RowParallelLinear)
                for param in part.parameters(recurse=False):
                    if param.dim() > 1 and (is_linear or is_expert(param)):
                        yield param


def _merge_units(units: Sequence[UnitDescription]) -> UnitDescription:
    """Return a unit that several layers form, with the name of the first one."""
    return replace(
        units[0],
        params=tuple(
            replace(param, name=f"{number}.{param.name}")
            for number, unit in enumerate(units)
            for param in unit.params
        ),
        flops_per_token=sum(unit.flops_per_token for unit in units),
        activation_nbytes=sum(unit.activation_nbytes for unit in units),
    )


def _prefix_names(units: Sequence[UnitDescription], chunk: int) -> list[UnitDescription]:
    """Return units with the number of their chunk as a prefix of their names."""
    prefix = f"chunk{chunk}"

    def prefixed(name: str) -> str:
        return f"{prefix}.{name}" if name else prefix

    return [
        replace(
            unit,
            name=prefixed(unit.name),
            tied=tuple((prefixed(owner), param) for owner, param in unit.tied),
            keeps_gathered=not unit.name,
        )
        for unit in units
    ]


def _is_matrix(param: nn.Parameter) -> bool:
    """Whether Megatron's matrix optimizers step a parameter."""
    is_embedding = getattr(param, "is_embedding_or_output_parameter", False)
    return param.dim() == 2 and not is_embedding


class _MetaDevices(TorchFunctionMode):
    """Creates tensors on the meta device if the call names another device."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def ranks_per_replica(args: Any) -> int:
    """Return the number of ranks of one data-parallel replica of the model.

    The model on a rank does not depend on the number of replicas, and the groups of thousands of
    ranks would take minutes to create.

    Args:
        args: Megatron's arguments.
    """
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    expert = expert_tensor * args.expert_model_parallel_size
    return int(args.pipeline_model_parallel_size * math.lcm(dense, expert))


def build_stage(args: Any, stage: int) -> list[nn.Module]:
    """Build the chunks of the first rank of a pipeline stage on the meta device.

    Args:
        args: Megatron's validated arguments, which must also be set in Megatron's global variables.
        stage: Number of the stage.
    """
    with _first_rank_of(args, stage):
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        with _MetaDevices(), torch.device("meta"):
            chunks: list[nn.Module] = training.get_model(build_model, wrap_with_ddp=False)
    return chunks


@contextlib.contextmanager
def _first_rank_of(args: Any, stage: int) -> Iterator[None]:
    """Create fake process groups of the smallest job with the same model parallelism."""
    num_ranks = ranks_per_replica(args)
    rank = stage * (num_ranks // args.pipeline_model_parallel_size)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
