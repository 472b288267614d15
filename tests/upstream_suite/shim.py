"""Names and arguments of upstream's Megatron-FSDP, v1 and v2, mapped to this package's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

import megatron_fsdp_v2
from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2.runtime.machine.state import Phase
from megatron_fsdp_v2.runtime.module import unit_of
from megatron_fsdp_v2_for import megatron_fsdp

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"


@dataclass(frozen=True)
class Placements:
    """Placements of weights, gradients and optimizer states on each axis."""

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    @property
    def strategies(self) -> tuple[str, str]:
        """The strategies along the inner and the outer axis."""
        inner = {(0, 0, 0): "no_shard", (0, 0, 1): "optim", (0, 1, 1): "optim_grads"} | {
            (1, 1, 1): "optim_grads_params"
        }
        kinds = (self.parameter, self.gradient, self.optimizer)
        shards = tuple(int(kind[-1].is_shard()) for kind in kinds)
        is_replicated = len(self.dp_axes) == 1 or isinstance(self.optimizer[0], Replicate)
        return inner[shards], "no_shard" if is_replicated else "optim"


class Flat:
    """Stand-in for upstream's placement."""


@dataclass
class Context:
    """The modules of a `fully_shard_context`, which share streams here in any case."""

    is_last_microbatch: bool = True
    modules: list[tuple[Any, bool]] = field(default_factory=list)


_CONTEXTS: list[Context] = []


@contextlib.contextmanager
def fully_shard_context(device: torch.device | None = None, **kwargs: bool) -> Iterator[Context]:
    """Collect the modules that are sharded inside the context."""
    del device
    if any(kwargs.values()):
        raise NotImplementedError(f"shim: {kwargs}")
    _CONTEXTS.append(Context())
    try:
        yield _CONTEXTS[-1]
    finally:
        _CONTEXTS.pop()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: Any = None,
    grad_divisor: int = 1,
) -> None:
    """Shard a module as upstream does: fp32 main weights, reductions in its dtype."""
    policy = mixed_precision_policy or SimpleNamespace(
        main_params_dtype=None, main_grads_dtype=None
    )
    inner, outer = placements.strategies
    megatron_fsdp_v2.fully_shard(
        module,
        mesh=mesh,
        sharding_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mp_policy=megatron_fsdp_v2.MixedPrecisionPolicy(
            main_params_dtype=policy.main_params_dtype or torch.float32,
            main_grads_dtype=policy.main_grads_dtype,
            grad_comm_dtype=next((param.dtype for param in module.parameters()), None),
            cast_forward_inputs=False,
        ),
        gradient_scaling_factor=1.0 / (mesh.size() * grad_divisor),
    )
    kind: Any = type(module)
    kind.phase = property(lambda sharded: unit_of(sharded).state.phase)
    kind.parameter_groups = property(_parameter_groups)
    _CONTEXTS[-1].modules.append((module, placements.gradient[-1].is_partial()))


class FsdpModule(FSDPModule):
    """Stand-in for upstream's mixin."""

    Phase = SimpleNamespace(RESTING=Phase.IDLE)


def _parameter_groups(module: nn.Module) -> tuple[SimpleNamespace, ...]:
    """Return what the tests read of upstream's parameter groups."""
    named = list(module.named_parameters(remove_duplicate=False))
    return tuple(
        SimpleNamespace(
            fsdp_parameters=[
                SimpleNamespace(fqns=tuple(name for name, held in named if held is param))
                for param in group.sharded_params
            ],
            model_weight=group.model_weight,
            main_weight=SimpleNamespace(
                layout=SimpleNamespace(size=sum(slot.numel for slot in group.layout.slots))
            ),
            requires_grad=group.is_trained,
            main_grad=group.main_grad,
            sync_model_weight_from_main_weight=lambda: None,
        )
        for group in unit_of(module).groups
    )


@contextlib.contextmanager
def microbatch(context: Context, is_last: bool) -> Iterator[None]:
    """Defer what upstream defers until the last micro-batch."""
    _set_last(context, is_last)
    try:
        yield
    finally:
        _set_last(context, True)


def _set_last(context: Context, is_last: bool) -> None:
    context.is_last_microbatch = is_last
    for module, is_partial in context.modules:
        if is_partial:
            module.set_requires_gradient_sync(is_last, recurse=False)
        else:
            module.set_requires_all_reduce(is_last, recurse=False)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, *, precision_aware: bool = False
) -> None:
    """Do nothing: every optimizer steps sharded parameters."""


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Save with torch's functions."""
    dcp.save(_state(model, optimizer), checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Load with torch's functions."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint_dir)
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(
        zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer), strict=True)
    )


class Utils:
    """Process groups of upstream's tests: those of the pool."""

    @staticmethod
    def initialize_model_parallel() -> None:
        """Do nothing."""

    destroy_model_parallel = initialize_model_parallel


def modules() -> dict[str, ModuleType]:
    """Return the modules in place of upstream's, by name."""
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    found = {f"{PACKAGE}.fully_shard": megatron_fsdp}
    v2 = [f"{PACKAGE}.experimental{part}" for part in ("", ".module", ".placement")]
    for name in (*v2, "tests.unit_tests.test_utilities"):
        module = ModuleType(name)
        vars(module).update(public)
        found[module.__name__] = module
    return found
