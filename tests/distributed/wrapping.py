"""Helpers: sharding small models, recording collectives, and comparing with plain models."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy
from megatron_fsdp_v2.comm.backends import CpuCommunicator
from megatron_fsdp_v2.comm.interface import Collective, Work
from megatron_fsdp_v2.runtime.module import unit_of
from tests.reference.models import INPUT, Stack
from tests.sharding import shard

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.float32,
    main_grads_dtype=torch.float32,
    grad_comm_dtype=torch.bfloat16,
)

MESHES: dict[str, tuple[tuple[int, ...], str]] = {
    "1": ((1,), "no_shard"),
    "2": ((2,), "no_shard"),
    "3": ((3,), "no_shard"),
    "4": ((4,), "no_shard"),
    "HSDP 2x2": ((2, 2), "no_shard"),
    "HFSDP 2x2": ((2, 2), "optim"),
}
"""Sizes of the axes, and the strategy along the outer axis, by name."""


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of a shape, created once in a process since its groups are never destroyed."""
    names = ("outermost", "outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_mesh(name: str) -> dict[str, Any]:
    """Arguments of `fully_shard` for one of `MESHES`."""
    shape, outer = MESHES[name]
    return {"mesh": mesh_of(*shape), "outer_dp_sharding_strategy": outer}


def strategies_on(name: str) -> tuple[str, ...]:
    """Strategies for one of `MESHES`: `no_shard` excludes sharding along the outer axis."""
    return STRATEGIES if MESHES[name][1] == "no_shard" else STRATEGIES[1:]


def wrap(model: Any, units: Iterable[nn.Module] | None = None, **options: Any) -> Any:
    """Shard a model: its `blocks` (or `units`) first, then the model, over all ranks."""
    if "mesh" not in options:
        options["mesh"] = mesh_of(dist.get_world_size())
    for unit in getattr(model, "blocks", ()) if units is None else units:
        shard(unit, **options)
    return shard(model, **options)


def error_message(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def check_error_messages(kind: type[Exception], calls: Mapping[str, Callable[[], Any]]) -> None:
    """Check that every call raises an error whose message contains its key."""
    for text, call in calls.items():
        message = error_message(kind, call)
        assert text in message, (text, message)


def batch(rank: int, step: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Inputs of one rank's step: `(rows, INPUT)`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, INPUT, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        dtype: Communication dtype.
        numel: Elements of the full buffer.
        axis_size: Number of ranks that take part.
        group: Name of their process group.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    axis_size: int
    group: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


NOT_LAUNCHED = ("detach", "alias", "_local_scalar_dense")
"""Views, and reads of a step counter, which is in host memory."""


class Dispatched(TorchDispatchMode):
    """Calls a function after every operation that reaches the dispatcher's Python key.

    Args:
        look: Called with the operation, its arguments and its result.
    """

    def __init__(self, look: Callable[[Any, Sequence[Any], Any], Any]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look(func, args, result)
        return result


class Operations(Dispatched):
    """Records the operations that launch work on a device."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.names: list[str] = []

    def _note(self, func: Any, *_: Any) -> None:
        name = func.overloadpacket.__name__
        if name not in NOT_LAUNCHED:
            self.names.append(name)


class CollectiveRecorder:
    """Wraps a communicator and records every collective; calls `look` before each."""

    def __init__(self, inner: Any, look: Callable[[], Any] = lambda: None) -> None:
        self._inner, self._look = inner, look
        self.sent: list[Sent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        full, axis = collective.full, collective.axis
        name, group = collective.kind.value, axis.group.group_name
        self.sent.append(Sent(name, full.dtype, full.numel(), axis.size, group))
        self._look()
        return self._inner.issue(collective, async_op=async_op)

    def count(self, kind: str) -> int:
        """Collectives of a kind."""
        return sum(sent.kind == kind for sent in self.sent)

    def nbytes(self, kind: str) -> int:
        """Bytes of the full buffers of a kind."""
        return sum(sent.nbytes for sent in self.sent if sent.kind == kind)

    def dtypes(self, *, gathers: bool) -> set[torch.dtype]:
        """Dtypes of gathers, or of reductions."""
        return {sent.dtype for sent in self.sent if (sent.kind == "all_gather") is gathers}


@dataclass
class Dying:
    """Collectives of this process, one of which fails.

    Attributes:
        count: Number of collectives since it was set to 0.
        dies_at: Number of the one that fails.
    """

    count: int = 0
    dies_at: int = -1


@contextlib.contextmanager
def dying_collectives() -> Iterator[Dying]:
    """Count the collectives of all models, and let one fail with 'a rank is gone'."""
    issue, dying = CpuCommunicator.issue, Dying()

    def counted(self: Any, collective: Collective, *, async_op: bool) -> Work:
        dying.count += 1
        if dying.count == dying.dies_at:
            raise RuntimeError("a rank is gone")
        return issue(self, collective, async_op=async_op)

    with mock.patch.object(CpuCommunicator, "issue", counted):
        yield dying


@contextlib.contextmanager
def count_collectives(axes: Any) -> Iterator[Counter[Any]]:
    """Count collectives by kind, axis, number of ranks and bytes of the full buffer."""
    found: Counter[Any] = Counter()
    issue = CpuCommunicator.issue

    def counted(self: Any, collective: Collective, *, async_op: bool) -> Any:
        where, size = "inner" if collective.axis == axes[-1] else "outer", collective.axis.size
        if size > 1:
            found[collective.kind.value, where, size, collective.full.nbytes] += 1
        return issue(self, collective, async_op=async_op)

    with mock.patch.object(CpuCommunicator, "issue", counted):
        yield found


def record_collectives(
    model: nn.Module, look: Callable[[], Any] = lambda: None
) -> CollectiveRecorder:
    """Record the collectives of a sharded model from now on; call `look` before each."""
    units = [unit_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    recorded = CollectiveRecorder(units[-1].context.communicator, look)
    for unit in units:
        for group in unit.groups:
            group.replace_communicator(recorded)  # type: ignore[arg-type]
    return recorded


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    """Set all elements of all parameters."""
    for param in model.parameters():
        param.fill_(value)


def whole(tensor: Any) -> Any:
    """The full tensor of a sharded one; any other value unchanged. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shards_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's rows of all parameters."""
    return [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def train_own(model: Any, steps: int = 2, num_micro: int = 1) -> list[torch.Tensor]:
    """Train a sharded model on this rank's data; return its `shards_of`.

    Gradients of all but the last micro-batch of a step are not synchronized.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(steps):
        for micro in range(num_micro):
            waits = micro < num_micro - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                own_loss(model, step).backward()
        step_all(optimizer)
    return shards_of(model)


# -- comparison with a plain model ----------------------------------------------------------------


def pair(
    build: Callable[[], Any] = Stack,
    units: Callable[[Any], Iterable[nn.Module]] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The same model twice: plain, and sharded.

    Args:
        build: Creates the model.
        units: Returns the units to shard first; the model's `blocks` if None.
        options: For `wrap`.
    """
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = build()
    return plain, wrap(model, None if units is None else units(model), **options)


def fp64_pair(strategy: str = "optim_grads_params", **options: Any) -> tuple[Any, Any]:
    """A `Stack` in fp64 twice: plain, and sharded."""
    return pair(lambda: Stack().double(), sharding_strategy=strategy, **options)


def held_error(param: Any, full: torch.Tensor) -> float:
    """Largest difference of this rank's rows from those of a full tensor; infinite for a NaN."""
    start, end = param.local_rows
    difference = param.to_local().detach().double() - full[start:end].detach().double()
    # Python's `max` of a number and a NaN is the number.
    return float(difference.abs().nan_to_num(torch.inf).max()) if difference.numel() else 0.0


def weight_error(sharded: nn.Module, plain: nn.Module) -> float:
    """Largest difference of this rank's weights from those of the plain model."""
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max(held_error(mine, theirs) for mine, theirs in pairs)


def gradient_error(sharded: nn.Module, plain: nn.Module) -> float:
    """Largest difference of this rank's gradients; a missing gradient is zero."""
    worst = 0.0
    for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        worst = max(worst, held_error(grad, wanted))
    return worst


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Mean square of the outputs for one rank's data of a step, in fp32 or fp64."""
    output = model(batch(rank, step, dtype=next(model.parameters()).dtype))
    loss: torch.Tensor = (output if output.dtype == torch.float64 else output.float()).square()
    return loss.mean()


def plain_loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Mean loss over all ranks' data."""
    return torch.stack([loss_of(model, r, step) for r in range(dist.get_world_size())]).mean()


def own_loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Loss of this rank's data."""
    return loss_of(model, dist.get_rank(), step)


def train_losses(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Train a sharded model on this rank's data; return the losses. Gradients are kept."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = own_loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def backward_both(plain: nn.Module, sharded: nn.Module, step: int = 0) -> None:
    """Run backwards of a plain model on all ranks' data and of a sharded model on this rank's."""
    size = dist.get_world_size()
    for rank in range(size):
        (loss_of(plain, rank, step) / size).backward()
    own_loss(sharded, step).backward()


def step_all(*optimizers: Any) -> None:
    """Step optimizers, and drop the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train_both(
    plain: Any, sharded: Any, optimizers: tuple[Any, Any], steps: range, after: Any = None
) -> None:
    """Train both for some steps; `after` runs after every step."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_both(plain, sharded, step)
        for optimizer in optimizers:
            optimizer.step()
        if after is not None:
            after()
