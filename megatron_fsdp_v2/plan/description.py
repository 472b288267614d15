"""Description of a training to be planned: units, parameters, meshes and the step. No tensors.

A description has the arguments of `fully_shard`, without a process group and memory. Its source is
a module on the meta device, or the command line of a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import (
    OUTER_NAMES,
    OuterShardingStrategy,
    ShardingStrategy,
)
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.formats import DenseFormat, WeightFormat, format_of
from megatron_fsdp_v2.runtime.options import RuntimeOptions

DATA = "dp"
"""Name of the mesh of all units without another one."""


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """Sizes of the payloads of a format, for plans.

    Attributes:
        itemsize: Bytes of one element of a payload.
        uses: Uses of every payload.
        is_kept: Whether payloads are always written once per step and kept. Otherwise, main weights
            with the same placement are cast for every gather.
        packing: Elements of a parameter per element of a payload.
    """

    itemsize: int
    uses: tuple[WeightUse, ...] = (WeightUse.BOTH,)
    is_kept: bool = False
    packing: int = 1


def payload_bytes(
    format_type: type[WeightFormat] | None, dtypes: GroupDtypes
) -> PayloadBytes | None:
    """Return the sizes of a format's payloads; None for plain numbers of the compute dtype.

    Args:
        format_type: The format; None if no registered format accepts the parameter.
        dtypes: Dtypes of weights and gradients.
    """
    if format_type is None or format_type is DenseFormat:
        return None
    uses = tuple(format_type.payloads.values())
    is_kept = format_type.communicates or len(uses) > 1
    return PayloadBytes(format_type.itemsize(dtypes), uses, is_kept, format_type.packing)


@dataclass(frozen=True, slots=True)
class ParameterDescription:
    """One parameter of a unit, as data parallelism sees it.

    Attributes:
        name: Relative to its unit.
        shape: Shape of the TP-local shard.
        dtype: Dtype in which the model was built.
        requires_grad: Whether it is trained.
        is_separate: Whether it has flat buffers of its own.
        is_matrix: Whether a matrix optimizer steps it, if there is one.
        payload: Bytes of its model weight; None for the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    is_separate: bool = False
    is_matrix: bool = False
    payload: PayloadBytes | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """A module that `fully_shard` is called on.

    Attributes:
        name: Name of the module; empty for the root. Names determine which unit contains which.
        params: Parameters it owns.
        mesh: Name of the mesh that they are sharded over.
        tied: `(unit, parameter)` of tied parameters that another unit owns.
        flops_per_token: Operations of its forward per token, without units inside it.
        activation_nbytes: Bytes that its forward keeps for the backward of a micro-batch, without
            units inside it.
        keeps_gathered: Whether it stays gathered between forward and backward, as the root does.
    """

    name: str
    params: tuple[ParameterDescription, ...]
    mesh: str = DATA
    tied: tuple[tuple[str, str], ...] = ()
    flops_per_token: float = 0.0
    activation_nbytes: int = 0
    keeps_gathered: bool = False

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class MeshDescription:
    """Data-parallel ranks of some parameters.

    Attributes:
        num_ranks: Number of ranks.
        stride: Distance between neighboring ranks, in global ranks; the ranks in between hold other
            parts of the model.
    """

    num_ranks: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.stride < 1:
            raise ValueError(
                f"a mesh needs at least 1 rank and a stride of at least 1, got {self.num_ranks} "
                f"and {self.stride}"
            )


@dataclass(frozen=True, slots=True)
class MemoryOption:
    """A change of the training that needs fewer bytes of activations.

    Attributes:
        text: The change, such as `--micro-batch-size 1`.
        activation_nbytes: Bytes of activations after the change.
    """

    text: str
    activation_nbytes: int


@dataclass(frozen=True, slots=True)
class TrainingDescription:
    """One rank's part of a training, without the sharding strategy.

    Attributes:
        units: Units, the root first, parents before children, siblings in the order they run.
        runs: Names of all units except the root in the order in which they run. A unit may run more
            than once, and nested units run as often as the units that contain them. Empty for the
            order of `units`.
        meshes: Meshes by name.
        policy: Dtypes.
        granularity: See `fully_shard(shard_granularity=...)`.
        optimizer: One of `optimizer_state.OPTIMIZERS`.
        optimizer_dtype: Dtype of its state, or the dtype of each state tensor; that of the main
            weights when None.
        matrix_dtype: Dtype in which a matrix optimizer exchanges matrices.
        spreads_replicated: See `MatrixEngine`.
        offload_fraction: Fraction of Adam's parameters stepped in host memory, from 0 to 1.
        cpu_offload: Whether main weights, main gradients and optimizer state are in host memory, as
            with `CPUOffloadPolicy`.
        num_microbatches: Forwards and backwards of a step.
        defers_sync: Whether all but the last of them run in `no_sync()`.
        syncs_afterwards: Whether gradients are synchronized after the last backward instead of in
            it.
        tokens: Tokens of a micro-batch on a rank.
        recompute_factor: Fraction of the forward that the backward repeats.
        recomputes_reentrantly: Whether each unit runs inside a reentrant checkpoint of its own. Its
            forward has no gradients then, so that its weights are dropped after it even with
            `reshard_after_forward=False`.
        reshard_after_forward: See `fully_shard`.
        options: Options of the root.
        num_extra_gathered: Further units that a schedule keeps gathered at a time.
        on_cpu: Whether reductions run on a CPU, where they have receive buffers.
        plain_nbytes: Bytes of buffers and parameters that are not sharded.
        num_in_flight: Micro-batches whose activations are alive at once: the number of forwards
            before the first backward, plus one.
        stages: Pipeline stages, for the idle time of the pipeline.
        num_chunks: Model chunks of a stage.
        alternatives: Changes that save activations.
        label: Name of this part of the model, such as a pipeline stage.
        notes: Notes for the reader of the plan.
    """

    units: tuple[UnitDescription, ...]
    meshes: Mapping[str, MeshDescription]
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    granularity: str = "row"
    optimizer: str = "adam"
    optimizer_dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    matrix_dtype: torch.dtype = torch.bfloat16
    spreads_replicated: bool = True
    offload_fraction: float = 0.0
    cpu_offload: bool = False
    num_microbatches: int = 1
    defers_sync: bool = True
    syncs_afterwards: bool = False
    runs: tuple[str, ...] = ()
    tokens: int = 0
    recompute_factor: float = 0.0
    recomputes_reentrantly: bool = False
    reshard_after_forward: bool = True
    options: RuntimeOptions = RuntimeOptions()  # noqa: RUF009
    num_extra_gathered: int = 0
    on_cpu: bool = False
    plain_nbytes: int = 0
    num_in_flight: int = 1
    stages: int = 1
    num_chunks: int = 1
    alternatives: tuple[MemoryOption, ...] = ()
    label: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.units or not any(unit.params for unit in self.units):
            raise ValueError("the model has no parameters, so there is nothing to plan")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {self.num_microbatches}")
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise ValueError(f"offload_fraction is from 0 to 1, got {self.offload_fraction}")
        if self.cpu_offload and self.offload_fraction:
            raise ValueError(
                f"cpu_offload has all state in host memory, so that offload_fraction="
                f"{self.offload_fraction} says nothing; leave one of them out"
            )
        unknown = {unit.mesh for unit in self.units} - set(self.meshes)
        if unknown:
            raise ValueError(f"units are on meshes {sorted(unknown)} that meshes does not have")
        different = {unit.name for unit in self.units[1:]} ^ set(self.runs)
        if self.runs and different:
            raise ValueError(
                f"runs has to name every unit but the root, and no others; {sorted(different)} are "
                "in units or in runs alone"
            )

    @property
    def numel(self) -> int:
        """Elements of all parameters of this rank's part of the model."""
        return sum(unit.numel for unit in self.units)

    @property
    def activation_nbytes(self) -> int:
        """Bytes of activations of all micro-batches in flight."""
        return self.num_in_flight * sum(unit.activation_nbytes for unit in self.units)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Sharding strategies of a training.

    Attributes:
        inner: Sharding strategy along the inner axis.
        outer: Sharding strategy along the outer axis.
        outer_size: Ranks along the outer axis; None for a 1-D mesh.
        others: Sharding strategies of meshes with their own, as pairs of mesh and strategy.
    """

    inner: ShardingStrategy = "optim_grads_params"
    outer: OuterShardingStrategy = "no_shard"
    outer_size: int | None = None
    others: tuple[tuple[str, ShardingStrategy], ...] = ()

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.outer_size is None:
            return self.inner
        return f"{self.inner}, {OUTER_NAMES[self.outer]} x{self.outer_size}"

    def inner_of(self, mesh: str) -> ShardingStrategy:
        """Sharding strategy along the inner axis of a mesh."""
        return dict(self.others).get(mesh, self.inner)


def mesh_sizes(mesh: MeshDescription, strategy: Strategy) -> tuple[int, ...]:
    """Sizes of the axes of a mesh, outermost first.

    Raises:
        ValueError: The outer axis does not divide the ranks.
    """
    if strategy.outer_size is None:
        return (mesh.num_ranks,)
    if strategy.outer_size < 1 or mesh.num_ranks % strategy.outer_size:
        raise ValueError(
            f"an outer axis of {strategy.outer_size} cannot divide {mesh.num_ranks} data-parallel "
            "ranks; choose a divisor"
        )
    return strategy.outer_size, mesh.num_ranks // strategy.outer_size


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model that cannot be read from its modules.

    Attributes:
        mesh_of: Returns the name of the mesh of a unit.
        is_matrix: Returns whether a matrix optimizer steps a parameter, given the name of its unit
            and the parameter.
        separate: Parameters with flat buffers of their own.
        flops_of: Returns the operations per token of a unit's forward, given its name and its
            parameters.
        payload_of: Returns the bytes of the model weight of a parameter, given the name of its unit
            and the parameter; None for the compute dtype.
        used: Parameters owned by other units that a unit's forward reads, by unit.
    """

    mesh_of: Callable[[nn.Module], str] = lambda unit: DATA
    # Matrix optimizers do not step the embedding and the output layer, which the root has.
    is_matrix: Callable[[str, nn.Parameter], bool] = lambda unit, param: (
        bool(unit) and param.dim() in (2, 3)
    )
    separate: AbstractSet[nn.Parameter] = frozenset()
    flops_of: Callable[[str, Sequence[ParameterDescription]], float] = lambda unit, params: sum(
        2.0 * param.numel for param in params if len(param.shape) > 1
    )
    payload_of: Callable[[str, nn.Parameter], PayloadBytes | None] = lambda unit, param: (
        payload_bytes(format_of(param), MixedPrecisionPolicy().resolve(param.dtype))
    )
    used: Mapping[nn.Module, AbstractSet[nn.Parameter]] = field(default_factory=dict)


def describe_module(
    module: nn.Module, units: Iterable[nn.Module] | None = None, rules: ModelTraits | None = None
) -> tuple[tuple[UnitDescription, ...], int]:
    """Describe a module and the units inside it; it may be built on the meta device.

    Args:
        module: The root.
        units: Modules to become units, inner ones before outer ones where they are nested;
            the members of the outermost `nn.ModuleList`s when None.
        rules: Traits that cannot be read from the modules.

    Returns:
        Units, parents before children, and bytes of the module's buffers, which are not sharded.

    Raises:
        ValueError: A unit is listed twice, or is not inside the module, or a parameter has no
            dimension.
    """
    chosen = list(_list_members(module) if units is None else units)
    names = {id(below): name for name, below in module.named_modules()}
    for unit in chosen:
        if id(unit) not in names:
            raise ValueError(f"a unit of class {type(unit).__name__} is not inside the model")
        if chosen.count(unit) > 1:
            raise ValueError(
                f"{names[id(unit)]} is listed twice as a unit; list it once, and if it runs twice, "
                "give TrainingDescription(runs=...)"
            )
    order = [unit for unit in chosen if unit is not module] + [module]
    walk = _Walk({id(unit) for unit in order}, rules or ModelTraits())
    described = {id(unit): walk.describe(unit, names[id(unit)]) for unit in order}
    buffers = {id(buffer): buffer for buffer in module.buffers()}
    plain_nbytes = sum(b.numel() * b.element_size() for b in buffers.values())
    in_order = [below for below in module.modules() if id(below) in described]
    return tuple(described[id(unit)] for unit in in_order), plain_nbytes


class _Walk:
    """Describes units in order; the first unit with a parameter owns it."""

    def __init__(self, boundaries: set[int], rules: ModelTraits) -> None:
        self._boundaries = boundaries
        self._rules = rules
        self._owners: dict[int, tuple[str, str]] = {}

    def describe(self, unit: nn.Module, name: str) -> UnitDescription:
        """Describe a unit after the units inside it."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, below in _own_modules(unit, self._boundaries):
            for attribute, param in below._parameters.items():
                if param is not None:
                    full = f"{prefix}.{attribute}" if prefix else attribute
                    found.setdefault(id(param), (full, param))
        keys = [*found, *map(id, self._rules.used.get(unit, ()))]
        tied = tuple(self._owners[key] for key in keys if key in self._owners)
        owned = {key: item for key, item in found.items() if key not in self._owners}
        self._owners |= {key: (name, full) for key, (full, _) in owned.items()}
        params = tuple(self._describe_param(name, *item) for item in owned.values())
        flops = self._rules.flops_of(name, params)
        return UnitDescription(name, params, self._rules.mesh_of(unit), tied, flops)

    def _describe_param(self, unit: str, name: str, param: nn.Parameter) -> ParameterDescription:
        if param.dim() == 0:
            raise ValueError(
                f"parameter {name} of {unit or 'the root'} is 0-dim and has no rows to shard; "
                "make it of shape (1,)"
            )
        return ParameterDescription(
            name,
            tuple(param.shape),
            param.dtype,
            param.requires_grad,
            is_separate=param in self._rules.separate,
            is_matrix=self._rules.is_matrix(unit, param),
            payload=self._rules.payload_of(unit, param),
        )


def _own_modules(module: nn.Module, boundaries: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Return a module and the modules below it that belong to the same unit, with names."""
    yield "", module
    for name, child in module.named_children():
        if id(child) in boundaries:
            continue
        for suffix, below in _own_modules(child, boundaries):
            yield f"{name}.{suffix}" if suffix else name, below


def _list_members(module: nn.Module) -> Sequence[nn.Module]:
    """Members of the outermost lists of modules, in the order they are registered."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [unit for child in module.children() for unit in _list_members(child)]
