"""ParameterGroup: parameters of one unit that are alike, their flat buffers and DTensors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_fsdp_v2.dp_buffer import DataParallelBuffer, ShardGrid
from megatron_fsdp_v2.group_grads import GroupGrads
from megatron_fsdp_v2.group_weights import GroupWeights
from megatron_fsdp_v2.layout import BufferLayout, Granularity
from megatron_fsdp_v2.mixed_precision import GroupDtypes
from megatron_fsdp_v2.uneven_dtensor import RowShards, UnevenDTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.allocator import Allocator
    from megatron_fsdp_v2.comm import Axis, Communicator, Ticket
    from megatron_fsdp_v2.placement import AxisPlacements

__all__ = ["GroupSpec", "OwnedParameter", "ParameterGroup"]


@dataclass(slots=True)
class OwnedParameter:
    """A parameter a unit owns, and every place in the unit it is registered at.

    Attributes:
        name: Its (first) name relative to the unit.
        param: The original parameter; dropped once its data is in the buffers.
        sites: `(module, attribute)` pairs; several for tied parameters.
    """

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything that parameters of one group have in common.

    Attributes:
        dtypes: Dtypes of weights and gradients.
        requires_grad: Whether they are trained.
        placements: Placements per mesh axis, outermost first.
        granularity: What a shard boundary must not cut.
        scale: Factor of a gradient's sum over data-parallel ranks.
        errors_on_missing_grad: Whether a parameter without gradient is an error or zero.
    """

    dtypes: GroupDtypes
    requires_grad: bool
    placements: tuple[AxisPlacements, ...]
    granularity: Granularity
    scale: float
    errors_on_missing_grad: bool


class ParameterGroup:
    """Parameters of one unit that share dtypes, `requires_grad` and mesh.

    At rest, modules hold `sharded_params`: DTensors over main weights. Between unshard and
    reshard they hold `unsharded_params`: plain parameters that are views of the gathered buffer
    and stay the same objects for the group's whole life, so that autograd finds what it saved.

    Attributes:
        name: For reports, such as `decoder.layers.3/0`.
        names: Parameter names relative to the unit.
        spec: What the parameters have in common.
        layout: Where they are in the flat buffer.
        weights: Main, model and gathered weights.
        grads: Gradient buffers; `None` for frozen parameters.
        sharded_params: DTensor parameters, in the order of `names`.
        unsharded_params: Plain parameters, likewise.
        make_room: Called before the full gradient buffer is given memory.
        ticket: The gather under way, if any.
    """

    def __init__(
        self,
        name: str,
        owned: Sequence[OwnedParameter],
        spec: GroupSpec,
        mesh: DeviceMesh,
        axes: Sequence[Axis],
        device: torch.device,
        communicator: Communicator,
        allocator: Allocator,
        make_room: Callable[[ParameterGroup], None],
    ) -> None:
        self.name = name
        self.make_room = make_room
        self.names = [p.name for p in owned]
        self.spec = spec
        grid = ShardGrid.of(axes, [p.main_weight for p in spec.placements])
        shapes = [tuple(p.param.shape) for p in owned]
        self.layout = BufferLayout.plan(shapes, grid.num_slices, spec.granularity)
        common = (name, self.layout, grid, spec.placements, spec.dtypes, device)
        self.weights = GroupWeights(*common, communicator, allocator)
        self.grads: GroupGrads | None = None
        if spec.requires_grad:
            self.grads = GroupGrads(*common, spec.scale, communicator, allocator)
        self._mesh = mesh
        self._row_shards = [grid.row_shards(self.layout, i) for i in range(len(owned))]
        self._sites = [[(weakref.ref(m), attribute) for m, attribute in p.sites] for p in owned]
        self.sharded_params = [self._shard(index, p) for index, p in enumerate(owned)]
        self.unsharded_params = [self._unsharded(index) for index in range(len(owned))]
        self._main_grad_views: list[torch.Tensor] | None = None
        self._grad_dtensors: list[UnevenDTensor | None] = [None] * len(owned)
        self.ticket: Ticket | None = None
        self._outer_ticket: Ticket | None = None
        self._refreshed_at: tuple[int, tuple[int, ...]] | None = None
        self.install(self.sharded_params)

    @property
    def main_weight(self) -> DataParallelBuffer:
        """What the optimizer steps."""
        return self.weights.main

    @property
    def model_weight(self) -> DataParallelBuffer:
        """What rests between uses, in the compute dtype."""
        return self.weights.model

    @property
    def main_grad(self) -> DataParallelBuffer | None:
        """The reduced gradient; `None` for frozen parameters."""
        return None if self.grads is None else self.grads.main

    def row_shards(self, index: int) -> RowShards:
        """Row ranges of a parameter over the mesh."""
        return self._row_shards[index]

    def _shard(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Copy this rank's rows of a parameter into the main weights and describe them."""
        local = self.weights.main.view(index)
        start, end = self.weights.main.rows(index)
        with torch.no_grad():
            local.copy_(owned.param.detach()[start:end])
        dtensor = UnevenDTensor.from_rows(
            local, self._mesh, self._row_shards[index], tuple(owned.param.shape)
        )
        sharded = nn.Parameter(dtensor, requires_grad=self.spec.requires_grad)
        if self.spec.requires_grad and self.spec.dtypes.main_grad != self.spec.dtypes.main_weight:
            sharded.grad_dtype = self.spec.dtypes.main_grad
        _carry_attributes(owned.param, sharded)
        return sharded

    def _unsharded(self, index: int) -> nn.Parameter:
        view = self.weights.gathered.view(index)
        param = nn.Parameter(view, requires_grad=self.spec.requires_grad)
        _carry_attributes(self.sharded_params[index], param)
        if self.grads is not None:
            # Weak, or parameter -> hook -> group -> parameter would outlive the model.
            group = weakref.ref(self)
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _collector(group, index)
            )
        return param

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Register these parameters at every site, without `nn.Module.__setattr__`'s checks."""
        for param, sites in zip(params, self._sites, strict=True):
            for module_ref, attribute in sites:
                module = module_ref()
                if module is not None:
                    module._parameters[attribute] = param

    def install_unsharded(self) -> None:
        """Register the gathered parameters, trained or frozen as the sharded ones are now."""
        for sharded, unsharded in zip(self.sharded_params, self.unsharded_params, strict=True):
            if unsharded.requires_grad != sharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
        self.install(self.unsharded_params)

    def collect(self, index: int, param: torch.Tensor) -> None:
        """Move one parameter's fresh gradient into the flat buffer."""
        assert self.grads is not None
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        self.before_first_grad()
        self.grads.add(index, grad)

    def before_first_grad(self) -> None:
        """Give the full gradient buffer memory unless it has some."""
        assert self.grads is not None
        if not self.grads.is_live:
            self.make_room(self)
            self.grads.acquire()

    def is_stale(self, epoch: int) -> bool:
        """Whether main weights may have changed since the model weights were made from them.

        Version counters see in-place operations, also through `to_local()`; the epoch stands for
        what they do not see: fused and foreach optimizer steps.
        """
        return self._refreshed_at != (epoch, self._versions())

    def refresh(self, epoch: int) -> None:
        """Bring the model weights up to date. Collective where it has to be.

        A cast of one's own shard is cheap and done every time. A gather is done when stale.
        """
        if not self.weights.is_refreshed_locally and not self.is_stale(epoch):
            return
        self.weights.refresh()
        self._refreshed_at = (epoch, self._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(
            itertools.chain.from_iterable(
                (p._version, p._local_tensor._version)  # type: ignore[attr-defined]
                for p in self.sharded_params
            )
        )

    def reduce_inner(self, *, async_op: bool, is_final: bool) -> Ticket:
        """Issue the reduction along the inner axis. Collective.

        Args:
            async_op: Whether to return before it is done.
            is_final: Whether it ends in the main gradient, with no outer axis to follow.

        Raises:
            RuntimeError: A gradient is missing where that is an error.
        """
        assert self.grads is not None
        missing = self.missing_names()
        if missing and self.spec.errors_on_missing_grad:
            raise RuntimeError(
                f"no gradient arrived for {', '.join(missing)} of unit {self.name}; freeze what "
                "is not trained, or wrap with on_missing_grad='zero'"
            )
        self.grads.fill_missing()
        if self._outer_ticket is not None:
            # An earlier reduction of this backward may still be reading the partial shard.
            self._outer_ticket.wait()
            self._outer_ticket = None
        accumulate = self._settle_main_grad() if is_final else False
        ticket = self.grads.reduce_inner(accumulate=accumulate, async_op=async_op)
        if is_final:
            self.install_grads()
        return ticket

    def reduce_outer(self, *, async_op: bool) -> Ticket:
        """Issue the reduction along the outer axis. Collective."""
        assert self.grads is not None
        accumulate = self._settle_main_grad()
        self._outer_ticket = self.grads.reduce_outer(accumulate=accumulate, async_op=async_op)
        self.install_grads()
        return self._outer_ticket

    def missing_names(self) -> list[str]:
        """Names of trained parameters that no gradient arrived for since the last reduction."""
        assert self.grads is not None
        return [
            name
            for name, filled, param in zip(
                self.names, self.grads.filled, self.sharded_params, strict=True
            )
            if not filled and param.requires_grad
        ]

    def _settle_main_grad(self) -> bool:
        """Bring the main gradient in line with `param.grad`, which the user may have changed.

        Returns:
            Whether a reduction adds to the main gradient (some `param.grad` is set) or
            overwrites it (none is).
        """
        assert self.grads is not None
        present = [p.grad is not None for p in self.sharded_params]
        if not any(present):
            return False
        for index, param in enumerate(self.sharded_params):
            view = self.main_grad_views[index]
            if view.numel() == 0:
                continue
            if param.grad is None:
                view.zero_()
            elif param.grad is not self._grad_dtensors[index]:
                view.copy_(param.grad._local_tensor)  # type: ignore[attr-defined]
        return True

    @property
    def main_grad_views(self) -> list[torch.Tensor]:
        """This rank's rows of every main gradient."""
        if self._main_grad_views is None:
            assert self.grads is not None
            main = self.grads.main
            self._main_grad_views = [main.view(index) for index in range(len(self.names))]
        return self._main_grad_views

    def install_grads(self) -> None:
        """Set `param.grad` of every trained parameter with rows here; `None` for the others.

        An empty tensor in a fused multi-tensor optimizer's list can corrupt its neighbours.
        """
        for index, param in enumerate(self.sharded_params):
            view = self.main_grad_views[index]
            if view.numel() == 0 or not param.requires_grad:
                continue
            dtensor = self._grad_dtensors[index]
            if dtensor is None:
                dtensor = UnevenDTensor.from_rows(
                    view, self._mesh, self._row_shards[index], tuple(param.shape)
                )
                self._grad_dtensors[index] = dtensor
            param.grad = dtensor


def _collector(
    group_ref: weakref.ref[ParameterGroup], index: int
) -> Callable[[torch.Tensor], None]:
    def collect(param: torch.Tensor) -> None:
        group = group_ref()
        if group is not None:
            group.collect(index, param)

    return collect


def _carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Hand on what others wrote on a parameter: whatever is in its `__dict__`.

    A rule and not a list: model code marks parameters (`sequence_parallel`, `allreduce`, ...) and
    optimizers read the marks. Names with a leading underscore and a value that is a tensor or a
    hook belong to torch or to a wrapper and stay behind.
    """
    for name, value in vars(source).items():
        if name in _TORCH_ATTRIBUTES or isinstance(value, torch.Tensor):
            continue
        setattr(target, name, value)


_TORCH_ATTRIBUTES = frozenset({"_is_param", "_row_shards", "_local_tensor", "_spec"})
