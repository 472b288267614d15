"""Options that all units of a root share, and the rarely used options of one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.runtime.machine.orders import PrefetchLimit
from megatron_fsdp_v2.runtime.machine.state import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Runtime options of the units of one root. They do not change results.

    Attributes:
        enable_unshard_prefetch: Gather the next unit while the current one computes.
        unshard_prefetch_depth: Number of units gathered ahead of the one that computes, at least 1.
            Each one takes the memory of a unit's gathered weights. More than one helps if a gather
            takes longer than the computation of a unit. None: any number if
            `unshard_prefetch_bytes` is set, else one.
        unshard_prefetch_bytes: Bytes of gathered weights that all units gathered ahead may take
            together. The next unit is gathered whatever its size. With `unshard_prefetch_depth`,
            both limits apply. None: no limit in bytes.
        enable_async_reduce_grad: Reduce the gradients of a unit while the next one computes.
        max_live_grad_buffers: Number of units that have full gradient buffers at a time, at least
            1. With 1, the next unit's first gradient waits for the reduction under way.
        enable_trace_pool: Place temporary buffers at planned addresses in one block of memory
            (`TracePoolAllocator`).
        check_ranks: `once`: ranks compare the parameters of a unit when they shard it; at the first
            use their units, and check that replicated weights are equal; and at ZeRO-3, until the
            first backward ends, the unit before each gather and reduction (a few integers over the
            mesh each time). `always`: before every gather and reduction of a training, so that a
            mismatch raises an error that names the unit instead of hanging. `never`: no checks.

    Raises:
        ValueError: An option has a value outside its range.
    """

    enable_unshard_prefetch: bool = True
    unshard_prefetch_depth: int | None = None
    unshard_prefetch_bytes: int | None = None
    enable_async_reduce_grad: bool = True
    max_live_grad_buffers: int = 2
    enable_trace_pool: bool = False
    check_ranks: CheckRanks = "once"

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name == "check_ranks":
                if value not in get_args(CheckRanks):
                    raise ValueError(
                        "check_ranks must be 'never', 'once' or 'always', got "
                        f"{value!r}: the value sets how often ranks compare their units"
                    )
            elif name.startswith("enable_"):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be True or False, got {value!r}")
            elif value is not None:
                check_at_least_one(name, value)

    @property
    def control(self) -> Control:
        """The options that the machine obeys."""
        units, nbytes = self.unshard_prefetch_depth, self.unshard_prefetch_bytes
        if not self.enable_unshard_prefetch:
            units = 0
        elif units is None and nbytes is None:
            units = 1
        return Control(
            PrefetchLimit(units, nbytes),
            self.enable_async_reduce_grad,
            self.max_live_grad_buffers,
            self.check_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitOptions:
    """Rarely used options of one unit.

    Attributes:
        runtime: Options that all units of the root share. None: the values passed to other units.
        tensor_shards: How tensor parallelism split parameters that are plain tensors. They become
            DTensors over its axis as well, with the shape of the whole weight. The keys are the
            parameters at the time of the call, also if they are on the meta device; the mapping is
            read when they have values. DTensors over a tensor-parallel mesh need no entry.
            `tensor_parallel.tensor_shards` makes the mapping for modules of plain tensors.
        separate_params: Parameters that get flat buffers of their own, so that the sharding of each
            depends only on its shape. Needed by pipeline stages that hold copies of one weight next
            to different parameters: all stages then shard the copies identically.
        used_params: Sharded parameters of other units that this unit's forward reads, such as an
            embedding's weight that is passed to an output layer. They are gathered for this unit
            too. A tied parameter that a module registers itself needs no entry.
        param_init_fn: Initializes a module's own parameters and buffers that were on the meta
            device, in place of its `reset_parameters()`.
        gather_group: A process group with the same ranks as the (inner) axis of the mesh, in the
            same order, for all-gathers of weights. With NCCL, gathers and reductions then run at
            the same time. None: the axis's own group.
        reduces_once: With ZeRO-2 and ZeRO-3, reduce gradients in the backward that synchronizes
            them only, as FSDP2 does, instead of in every backward. Takes the memory of the unit's
            whole gradient until then.
    """

    runtime: RuntimeOptions | None = None
    tensor_shards: Mapping[nn.Parameter, TensorShard] = field(default_factory=dict)
    separate_params: AbstractSet[nn.Parameter] = frozenset()
    used_params: AbstractSet[nn.Parameter] = frozenset()
    param_init_fn: Callable[[nn.Module], None] | None = None
    gather_group: dist.ProcessGroup | None = None
    reduces_once: bool = False


def check_at_least_one(name: str, value: object) -> None:
    """Check the value of an option that is a count.

    Raises:
        ValueError: The value is not a whole number of at least 1.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def given_options(runtime: RuntimeOptions | None, **switches: bool | None) -> dict[str, Any]:
    """Return the shared options passed to one call of `fully_shard`, by name.

    Args:
        runtime: All shared options, or None.
        switches: Arguments of `fully_shard`, None if not given. They take precedence.
    """
    given = {} if runtime is None else {f.name: getattr(runtime, f.name) for f in fields(runtime)}
    return given | {name: value for name, value in switches.items() if value is not None}


def merge_options(given: Iterable[tuple[str, Mapping[str, Any]]]) -> RuntimeOptions:
    """Return the options of a root: the options passed to its units, and defaults for the rest.

    Args:
        given: Per unit, its name and the options passed to it.

    Raises:
        ValueError: Two units were given different values, or a value is outside its range.
    """
    known: dict[str, tuple[str, Any]] = {}
    for name, options in given:
        for option, value in options.items():
            other, first = known.setdefault(option, (name, value))
            if first != value:
                raise ValueError(
                    f"{option}={first!r} for {other} and {option}={value!r} for {name}: units of "
                    "one root share it; give it to the root alone, or the same to all"
                )
    return RuntimeOptions(**{option: value for option, (_, value) in known.items()})
