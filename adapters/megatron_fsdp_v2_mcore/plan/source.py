"""What a training with Megatron's flags would hold and send: the source of `plan -- <flags>`.

Flags are parsed and validated by Megatron for the whole number of ranks, the model is built on the
meta device as one rank of each pipeline stage would, and units, meshes and dtypes come from the
code that shards it in a training.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_cpu_rehearsal import rehearse
from megatron_cpu_rehearsal.flags import IMPL_FLAG, LOCAL
from megatron_cpu_rehearsal.patching import environment
from megatron_fsdp_v2.params.formats import PayloadBytes, WeightUse
from megatron_fsdp_v2.plan.description import (
    DATA,
    MeshDescription,
    ModelTraits,
    Strategy,
    TrainingDescription,
    UnitDescription,
    describe_module,
)
from megatron_fsdp_v2.plan.sources import FlagsError, SourceResult
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.precision import (
    apply_main_grads_dtype,
    dtype_of,
    is_precision_aware,
    state_dtypes,
)
from megatron_fsdp_v2_mcore.plan.costs import Costs
from megatron_fsdp_v2_mcore.plan.flags import (
    parsed,
    rejections_as_errors,
    without_gpu_flags,
)
from megatron_fsdp_v2_mcore.plan.model import build_stage

__all__ = ["describe"]

EXPERT = "expert dp"
"""Name of the mesh of experts."""


def describe(flags: Sequence[str], num_ranks: int) -> SourceResult:
    """Describe a training; in a process of its own, which has no process group.

    Args:
        flags: Training flags, as `pretrain_gpt` takes them.
        num_ranks: Ranks of the job.

    Raises:
        FlagsError: Megatron or this package rejects the flags.
        RuntimeError: This process has a process group.
        SystemExit: Megatron does not know a flag; it has said so, with code 2.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan needs a process that has no process group; start another one")
    with _quiet_megatron(flags, num_ranks) as argv:
        args, keeps_attention = _arguments(argv, flags)
        try:
            with rejections_as_errors():
                return _describe(args, num_ranks, keeps_attention=keeps_attention)
        finally:
            _forget_globals()


@contextlib.contextmanager
def _quiet_megatron(flags: Sequence[str], num_ranks: int) -> Iterator[list[str]]:
    """Megatron on a CPU, with this package installed and nothing printed but errors."""
    from megatron_fsdp_v2_mcore import install, uninstall

    with (
        environment({"WORLD_SIZE": str(num_ranks), "RANK": "0", "LOCAL_RANK": "0"}),
        contextlib.redirect_stdout(io.StringIO()),
        rehearse([*without_gpu_flags(flags), IMPL_FLAG, LOCAL]) as argv,
    ):
        install()
        try:
            yield argv
        finally:
            uninstall()


def _arguments(argv: Sequence[str], flags: Sequence[str]) -> tuple[Any, bool]:
    """Megatron's arguments, and whether the user's flags have attention keep its matrix."""
    from megatron.training import global_vars

    args, asked = parsed(argv, flags)
    args.init_model_with_meta_device = True
    if args.vocab_size is None and args.padded_vocab_size is None:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        try:
            build_tokenizer(args)
        except Exception as error:
            raise FlagsError(
                f"the size of the vocabulary is not known: the tokenizer cannot be read here "
                f"({error}); add --vocab-size"
            ) from None
    # Stripped before, as only a GPU can support it where this package is not there.
    args.optimizer_cpu_offload = asked.optimizer_cpu_offload
    args.use_precision_aware_optimizer = is_precision_aware(asked)
    if args.use_precision_aware_optimizer:
        args.exp_avg_dtype, args.exp_avg_sq_dtype = state_dtypes(asked)
        apply_main_grads_dtype(asked)
        args.megatron_fsdp_main_grads_dtype = dtype_of(asked.megatron_fsdp_main_grads_dtype)
    # The model is built of Megatron's own layers, which have no such parameters.
    args.plans_fp4 = bool(asked.fp4 and asked.fp4_param_gather)
    args.plans_quantized = bool(asked.fp8 and asked.fp8_param_gather) or args.plans_fp4
    args.fp8_param_gather = False
    for name in ("fp8_recipe", "first_last_layers_bf16"):
        setattr(args, name, getattr(asked, name))
    global_vars.set_args(args)
    return args, getattr(asked.attention_backend, "name", "") in ("unfused", "local")


def _forget_globals() -> None:
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars

    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()


def _describe(args: Any, num_ranks: int, *, keeps_attention: bool) -> SourceResult:
    from megatron.training.training import get_megatron_ddp_config

    from megatron_fsdp_v2_mcore.flags.settings import sharding_settings

    settings = sharding_settings(get_megatron_ddp_config(args))
    options = Options.from_args(args)
    expert_strategy = options.expert_strategy
    gathered_dtype = torch.uint8 if args.plans_quantized else args.params_dtype
    instances = args.num_distributed_optimizer_instances
    strategy = Strategy(
        settings.sharding_strategy,
        settings.outer_sharding_strategy,
        instances if instances > 1 else None,
        () if expert_strategy is None else ((EXPERT, expert_strategy),),
    )
    common: dict[str, Any] = dict(
        meshes=_meshes(args, num_ranks),
        policy=settings.policy,
        optimizer=args.optimizer,
        optimizer_dtype=state_dtypes(args) if args.use_precision_aware_optimizer else None,
        offload_fraction=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        matrix_dtype=settings.policy.main_params_dtype or args.params_dtype,
        num_microbatches=_num_microbatches(args, num_ranks),
        syncs_afterwards=not settings.enable_async_reduce_grad,
        options=settings.runtime_options(options, gathered_dtype),
        stages=args.pipeline_model_parallel_size,
        recompute_factor=1.0 if args.recompute_granularity == "full" else 0.0,
    )
    stages = range(args.pipeline_model_parallel_size)
    described = [
        _stage(args, stage, strategy, common, keeps_attention=keeps_attention) for stage in stages
    ]
    return SourceResult(tuple(described), strategy)


def _meshes(args: Any, num_ranks: int) -> dict[str, MeshDescription]:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    meshes = {DATA: MeshDescription(num_ranks // (tensor * pipeline), tensor)}
    if args.num_experts:
        expert_tensor = args.expert_tensor_parallel_size or tensor
        stride = expert_tensor * args.expert_model_parallel_size
        meshes[EXPERT] = MeshDescription(num_ranks // (stride * pipeline), stride)
    return meshes


def _num_microbatches(args: Any, num_ranks: int) -> int:
    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    replicas = num_ranks // (size * args.context_parallel_size)
    return int(args.global_batch_size // (args.micro_batch_size * replicas))


def _stage(
    args: Any, stage: int, strategy: Strategy, common: dict[str, Any], *, keeps_attention: bool
) -> TrainingDescription:
    """Describe what the first rank of a pipeline stage holds."""
    num_stages = common["stages"]
    chunks = build_stage(args, stage)
    is_last = stage == num_stages - 1
    costs = [
        Costs(args, is_last and number == len(chunks) - 1, keeps_attention)
        for number in range(len(chunks))
    ]
    overlaps = args.overlap_moe_expert_parallel_comm
    # Pipeline stages begin one more forward before their first backward then.
    ahead = 1 if overlaps and num_stages > 1 else 0
    in_flight = min(num_stages - stage + ahead, common["num_microbatches"])
    units: list[UnitDescription] = []
    plain_nbytes = 0
    layers: list[bool] = []
    for number, chunk in enumerate(chunks):
        kinds = _layers(chunk)
        found, buffers = _chunk(args, chunk, strategy, costs[number], kinds)
        layers += kinds.values()
        units += _renamed(found, number) if len(chunks) > 1 else found
        plain_nbytes += buffers
    if len(chunks) > 1:
        # Chunks have roots of their own; what joins them here holds nothing.
        units.insert(0, UnitDescription("", ()))
    return TrainingDescription(
        units=tuple(units),
        plain_nbytes=plain_nbytes,
        tokens=costs[-1].tokens,
        num_in_flight=in_flight,
        # A layer without experts, from its attention to its MLP.
        num_held_beside=1 if overlaps and not all(layers) else 0,
        num_chunks=len(chunks),
        alternatives=costs[-1].alternatives(layers, in_flight),
        label=f"stage {stage} of {num_stages}" if num_stages > 1 else "",
        notes=tuple(_notes(args, len(chunks))),
        **common,
    )


def _notes(args: Any, num_chunks: int) -> Iterator[str]:
    """What a reader should know of how well things are counted."""
    tensor = args.tensor_model_parallel_size
    yield "activations and operations are estimates by formula (Korthikanti et al. 2022)"
    if max(tensor, args.pipeline_model_parallel_size, args.expert_model_parallel_size) > 1:
        yield "what tensor, pipeline and expert parallelism send is not in the time"
    if tensor > 1 and "muon" in args.optimizer and args.muon_tp_mode != "blockwise":
        yield "matrices that are put together from tensor-parallel parts are counted part by part"
    if args.recompute_granularity == "full" and (args.recompute_num_layers or 1) > 2:
        yield "layers recomputed together are gathered more often than is counted"
    if args.overlap_moe_expert_parallel_comm:
        yield (
            "micro-batches that overlap: the root is gathered once for all of them, not for each "
            "as is counted, and what they hide of one another is not in the time"
        )
    if num_chunks > 1:
        yield "virtual pipeline stages: counts of collectives and times are estimates"


def _layers(chunk: nn.Module) -> dict[str, bool]:
    """Layers of a chunk, each with whether it has experts."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    from megatron_fsdp_v2_mcore.model.units import UNIT_CLASSES

    def has_experts(layer: nn.Module) -> bool:
        return any(isinstance(part, BaseMoELayer) for part in layer.modules())

    layers = [pair for pair in chunk.named_modules() if isinstance(pair[1], UNIT_CLASSES)]
    return {name: has_experts(layer) for name, layer in layers}


def _chunk(
    args: Any, chunk: nn.Module, strategy: Strategy, costs: Costs, layers: dict[str, bool]
) -> tuple[list[UnitDescription], int]:
    """The units of a model chunk, as `FullyShardedDataParallel` makes them."""
    from megatron_fsdp_v2_mcore.flags.settings import unit_bytes
    from megatron_fsdp_v2_mcore.model.mamba_parameters import follow_parameters
    from megatron_fsdp_v2_mcore.model.meshes import Meshes
    from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert
    from megatron_fsdp_v2_mcore.model.units import UNIT_CLASSES, plan_units, shared_by_stages

    follow_parameters(chunk)
    dense, expert = (Meshes(cast("Any", None), None) for _ in range(2))
    has_experts = any(is_expert(param) for param in chunk.parameters())
    planned = plan_units(
        chunk,
        UNIT_CLASSES,
        dense,
        expert if has_experts else None,
        strategy.inner,
        strategy.inner_of(EXPERT),
        unit_bytes(
            Options.from_args(args), args.suggested_communication_unit_size, args.params_dtype
        ),
        runs_whole=not costs.args.overlap_moe_expert_parallel_comm,
    )
    modules = [module for unit in planned for module in unit.modules]
    apart = {id(module) for unit in planned if unit.meshes is expert for module in unit.modules}
    if dict(strategy.others):
        experts = {id(layer.experts) for layer in chunk.modules() if hasattr(layer, "experts")}
        apart |= {id(module) for module in modules} & experts
    quantized = {id(param) for name in layers for param in _quantized(args, chunk, name)}
    forms: tuple[WeightUse, ...] = (WeightUse.BOTH,)
    if args.fp8_recipe == "mxfp8" and not args.plans_fp4:
        forms = (WeightUse.FORWARD, WeightUse.BACKWARD)
    payload = PayloadBytes(1, forms, rests=True, packing=2 if args.plans_fp4 else 1)
    rules = ModelTraits(
        mesh_of=lambda unit: EXPERT if id(unit) in apart else DATA,
        is_matrix=lambda unit, param: _is_matrix(param),
        separate=shared_by_stages(chunk),
        used={module: unit.used_params for unit in planned for module in unit.modules},
        flops_of=costs.flops,
        payload_of=lambda unit, param: payload if id(param) in quantized else None,
    )
    units, plain_nbytes = describe_module(chunk, modules, rules)
    names = {id(module): name for name, module in chunk.named_modules()}
    described = {unit.name: _with_activations(unit, layers, costs) for unit in units}
    for unit in planned:
        first, *others = [names[id(module)] for module in unit.modules]
        parts = [described[first], *[described.pop(name) for name in others]]
        described[first] = _joined(parts) if others else parts[0]
    return list(described.values()), plain_nbytes


def _joined(units: Sequence[UnitDescription]) -> UnitDescription:
    """Describe the unit that several layers become, under the name of the first."""
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


def _quantized(args: Any, chunk: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """Parameters of a layer that Transformer Engine would make quantized: those of its products."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

    layer: Any = chunk.get_submodule(name)
    number = getattr(layer, "layer_number", None)
    if not args.plans_quantized:
        return
    if number is not None and is_first_last_bf16_layer(args, number - 1):
        return
    for part in layer.modules():
        is_product = isinstance(part, ColumnParallelLinear | RowParallelLinear)
        for param in part.parameters(recurse=False):
            if param.dim() > 1 and (is_product or is_expert(param)):
                yield param


def _with_activations(
    unit: UnitDescription, layers: dict[str, bool], costs: Costs
) -> UnitDescription:
    if unit.name in layers:
        has_experts = layers[unit.name]
        return replace(unit, activation_nbytes=costs.layer_activations(has_experts=has_experts))
    return replace(unit, activation_nbytes=0 if unit.name else costs.root_activations())


def _renamed(units: Sequence[UnitDescription], chunk: int) -> list[UnitDescription]:
    """Units under the number of their chunk."""
    prefix = f"chunk{chunk}"

    def under(name: str) -> str:
        return f"{prefix}.{name}" if name else prefix

    return [
        replace(
            unit,
            name=under(unit.name),
            tied=tuple((under(owner), param) for owner, param in unit.tied),
            keeps_gathered=not unit.name,
        )
        for unit in units
    ]


def _is_matrix(param: nn.Parameter) -> bool:
    """Whether Megatron's optimizers of matrices step a parameter, by Megatron's own rule."""
    is_embedding = getattr(param, "is_embedding_or_output_parameter", False)
    return param.dim() == 2 and not is_embedding
