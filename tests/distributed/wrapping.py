"""Sharding the small models, and listening to what is communicated; shared by tests here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm.interface import Collective
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.reference.models import INPUT, Stack

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.float32,
    main_grads_dtype=torch.float32,
    grad_comm_dtype=torch.bfloat16,
)


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of a shape; once in a process, since its groups are never ended."""
    names = ("outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(model: Any, units: Iterable[nn.Module] | None = None, **options: Any) -> Any:
    """Shard a model: its `blocks` (or `units`) first, then the model, over all ranks."""
    options.setdefault("mesh", mesh_of(dist.get_world_size()))
    for unit in model.blocks if units is None else units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def said(kind: type[Exception], call: Callable[[], Any]) -> str:
    """What the error says that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def batch(rank: int, step: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Inputs of one rank's step: `(rows, INPUT)`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, INPUT, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: `all_gather`, `reduce_scatter` or `all_reduce`.
        dtype: Communication dtype.
        numel: Elements of the full buffer.
        axis_size: Ranks that take part.
        group: Name of their process group.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    axis_size: int
    group: str = field(default="", compare=False)


NOT_LAUNCHED = ("detach", "alias", "_local_scalar_dense")
"""Another look at the same memory; and the value of a step counter, which is in host memory."""


class Operations(TorchDispatchMode):
    """Notes operations that a device has work with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NOT_LAUNCHED:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Wire:
    """A communicator that notes every collective, around the real one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: list[Sent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        full, axis = collective.full, collective.axis
        name, group = collective.kind.value, axis.group.group_name
        self.sent.append(Sent(name, full.dtype, full.numel(), axis.size, group))
        return self._inner.issue(collective, async_op=async_op)

    def count(self, kind: str) -> int:
        """Collectives of a kind."""
        return sum(sent.kind == kind for sent in self.sent)

    def dtypes(self, *, gathers: bool) -> set[torch.dtype]:
        """Dtypes of gathers, or of reductions."""
        return {sent.dtype for sent in self.sent if (sent.kind == "all_gather") is gathers}


def listen(model: nn.Module) -> Wire:
    """Note the collectives of a sharded model from now on."""
    units = [unit_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    wire = Wire(units[-1].context.communicator)
    for unit in units:
        for group in unit.groups:
            group.weights.replace_communicator(wire)  # type: ignore[arg-type]
            if group.grads is not None:
                group.grads.replace_communicator(wire)  # type: ignore[arg-type]
    return wire


def held_error(param: Any, full: torch.Tensor) -> float:
    """Largest difference of the rows held here to those of a full tensor."""
    start, end = param.local_rows
    difference = param.to_local().detach().double() - full[start:end].detach().double()
    return float(difference.abs().max()) if difference.numel() else 0.0


def fp64_pair(strategy: str = "optim_grads_params", **options: Any) -> tuple[Any, Any]:
    """The same fp64 model twice: plain, and sharded."""
    torch.manual_seed(0)
    plain = Stack().double()
    torch.manual_seed(0)
    return plain, wrap(Stack().double(), sharding_strategy=strategy, **options)


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Mean over all ranks' data."""
    size = dist.get_world_size()
    losses = [model(batch(rank, step, dtype=torch.float64)).square().mean() for rank in range(size)]
    return torch.stack(losses).mean()


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Of this rank's data."""
    loss: torch.Tensor = model(batch(dist.get_rank(), step, dtype=torch.float64)).square().mean()
    return loss


def weight_error(sharded: nn.Module, plain: nn.Module) -> float:
    """Largest difference of the weights held here to those of the plain model."""
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max(held_error(mine, theirs) for mine, theirs in pairs)


def train_both(
    plain: Any, sharded: Any, optimizers: tuple[Any, Any], steps: range, after: Any = None
) -> None:
    """Train both for some steps; `after` runs after every step."""
    for step in steps:
        for model, optimizer, loss in (
            (plain, optimizers[0], plain_loss),
            (sharded, optimizers[1], own_loss),
        ):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
        if after is not None:
            after()
