"""Parameters of a group: sharded and gathered, and the modules that register them."""

from __future__ import annotations

import inspect
import operator
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import stateless
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_v2.dtensor.row_shards import GroupInfo, RowShards, TensorShard
from megatron_fsdp_v2.dtensor.sharded_rows import (
    local_of,
    plain_attributes,
    plain_of,
    raw_grad,
    raw_hooks,
    raw_requires_grad,
    raw_version,
    sharded_grad,
)
from megatron_fsdp_v2.dtensor.tp_params import ComputePlacement, from_part
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.memory.allocator import set_data
from megatron_fsdp_v2.params.autograd import InternalHook
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, GroupSpec
from megatron_fsdp_v2.params.formats import WeightFormat
from megatron_fsdp_v2.params.gathered import (
    GatheredParameter,
    GatheredSlot,
    freed_class,
    gathered_class,
)


@dataclass(slots=True)
class OwnedParameter:
    """A parameter that a unit owns, and all modules of the unit that register it.

    Attributes:
        name: First name relative to the unit.
        param: Original parameter; dropped once its data is in the buffers.
        sites: `(module, attribute)` pairs; several for tied parameters.
        meta_original: Meta parameter that this one replaced; modules may hold it elsewhere.
        tensor: Tensor-parallel split, if given.
        dtensor: Placement that its module computes with, if it is a DTensor.
        data_axes: Names of the data-parallel axes of its mesh, if it is a DTensor over some.
        spec: Properties of its group, if they differ from those of its unit.
        has_equal_shares: Whether every rank must hold the same amount of it.
        is_separate: Whether it gets flat buffers of its own.
        values: Initial values of its main weight; None: the format provides them.
        format_type: Format of its group, if its class alone does not determine the format.
    """

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    meta_original: nn.Parameter | None = None
    tensor: TensorShard | None = None
    dtensor: ComputePlacement | None = None
    data_axes: AbstractSet[str] = frozenset()
    spec: GroupSpec | None = None
    has_equal_shares: bool = False
    is_separate: bool = False
    values: torch.Tensor | None = None
    format_type: type[WeightFormat] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that data parallelism shards: the parameter or its TP-local shard."""
        return tuple(plain_of(self.param).shape)


class GroupParameters:
    """Parameters of one group, sharded and gathered, and the modules that register them.

    Model code may replace a parameter (`load_state_dict(assign=True)`), and a conversion may change
    its storage. `sync` applies such changes: it copies the values into the main weights, and uses a
    DTensor that replaced a parameter in its place, so that an optimizer built on this DTensor steps
    the right weights.

    Attributes:
        names: Names relative to the unit.
        row_shards: Row ranges of every main weight over the mesh.
        dtensors: Placements of parameters that were DTensors; None for others.
        sharded: DTensors over main weights, registered on modules while the group is sharded.
        gathered: Parameters that modules compute with: views of the gathered buffer, DTensors over
            the tensor-parallel mesh, or what the format binds to a view. The same objects for the
            group's whole life, so that tensors saved by autograd stay valid.
        views: Rows of the main weights, the local tensors of `sharded`.
    """

    def __init__(
        self,
        main_weight: DataParallelBuffer,
        gathered_weights: Sequence[DataParallelBuffer],
        weight_format: WeightFormat,
        kernel_grad: Callable[[int], torch.Tensor | None],
        owned: Sequence[OwnedParameter],
        row_shards: Sequence[RowShards],
    ) -> None:
        """Copy this rank's rows into the main weights, and make sharded and gathered parameters.

        Args:
            main_weight: Buffer of the main weights.
            gathered_weights: Buffer of the gathered weights of each payload of the format.
            weight_format: Format of the group.
            kernel_grad: See `GatheredSlot`.
            owned: The original parameters, which are not changed.
            row_shards: Row ranges of each parameter over the mesh.
        """
        self._info, spec = main_weight.context.info, main_weight.context.spec
        self._main_weight = main_weight
        self._num_moves = 0
        # Gathered parameters that share memory with the main weight, with their indices.
        self._in_main_weight: list[tuple[int, torch.Tensor]] = []
        self._format = weight_format
        self._kernel_grad = kernel_grad
        self._trained = [spec.requires_grad] * len(owned)
        self._sites = [
            (index, weakref.ref(module), attribute)
            for index, parameter in enumerate(owned)
            for module, attribute in parameter.sites
        ]
        self.names = [p.name for p in owned]
        self.row_shards = row_shards
        self.dtensors = [p.dtensor for p in owned]
        self.sharded = [self._sharded(i, p, spec.mesh) for i, p in enumerate(owned)]
        for sharded in self.sharded:
            # Torch rejects gradients of other dtypes by default.
            if sharded.dtype != spec.dtypes.main_grad:
                sharded.grad_dtype = spec.dtypes.main_grad
        self.gathered = [self._gathered(i, p, gathered_weights) for i, p in enumerate(owned)]
        self._format.adopt(self.gathered)
        self._live = [(param, type(param)) for param in self.gathered]
        self._freed = [(param, freed_class(cls)) for param, cls in self._live]
        self.note_written()
        self.views = [local_of(param) for param in self.sharded]

    def _sharded(self, index: int, owned: OwnedParameter, mesh: DeviceMesh) -> nn.Parameter:
        """Copy the original's rows into the main weight, and return a DTensor over them."""
        rows, (start, end) = self._main_weight.view(index), self._main_weight.rows(index)
        with torch.no_grad():
            values = self._format.values(owned.param) if owned.values is None else owned.values
            rows.copy_(values[start:end])
        if owned.tensor is not None:
            mesh = owned.tensor.mesh or mesh
        shards, is_trained = self.row_shards[index], self._trained[index]
        dtensor = UnevenDTensor.from_rows(rows, mesh, shards, shards.global_shape(owned.shape))
        # As `nn.Parameter` does, without DTensor's dispatch: in torch 2.15 it queries the number of
        # devices per host, which fails on the meta device that plans run on.
        dtensor._is_param = True
        sharded = cast("nn.Parameter", dtensor.requires_grad_(is_trained))
        propagate_attributes(owned.param, sharded, self._format.own_attributes)
        return sharded

    def _gathered(
        self, index: int, owned: OwnedParameter, buffers: Sequence[DataParallelBuffer]
    ) -> nn.Parameter:
        """Make the parameter that modules compute with, over a view of the gathered buffers."""
        is_trained, dtensor = self._trained[index], self.dtensors[index]
        views = [buffer.view(index) for buffer in buffers]
        param: nn.Parameter
        if dtensor is not None:
            param = nn.Parameter(from_part(views[0], dtensor.spec), requires_grad=is_trained)
            # A DTensor's memory is that of its local tensor.
            memory: Sequence[torch.Tensor] = [local_of(param)]
        else:
            bound = self._format.bind(views, index, owned.param)
            if type(bound) is torch.Tensor:
                param = GatheredParameter(bound, requires_grad=is_trained)
            else:
                param = nn.Parameter(bound, requires_grad=is_trained)
                param.__class__ = gathered_class(type(param))
            memory = self._format.memory(param, index)
        dtypes = self._main_weight.context.spec.dtypes
        if is_trained and {dtypes.grad_comm, dtypes.main_grad} != {dtypes.model_weight}:
            # Autograd would round a wider gradient of a custom function to the dtype of the weight.
            param.grad_dtype = None
        slot = GatheredSlot(self._info, index, self.names[index], self._kernel_grad)
        param._owner_slot = slot  # type: ignore[attr-defined]
        for buffer, part in zip(buffers, memory, strict=True):
            buffer.track_alias(part)
            if buffer is self._main_weight:
                self._in_main_weight.append((index, part))
        propagate_attributes(self.sharded[index], param)
        return param

    def label(self, index: int) -> str:
        """Return the name of a parameter for error messages."""
        return f"{self.names[index]} of {self._info.name}"

    # -- registration -------------------------------------------------------------------------

    def replace_originals(self, owned: Sequence[OwnedParameter]) -> None:
        """Register the sharded parameters in place of the originals, and mark the originals stale.

        This is the first change of existing objects. Users' hook tables move to the sharded
        parameters, so that handles of registered hooks stay valid.

        Args:
            owned: The original parameters.
        """
        for index, parameter in enumerate(owned):
            for original in (parameter.param, parameter.meta_original):
                if original is None:
                    continue
                with plain_attributes():
                    hooks: Any = original._post_accumulate_grad_hooks
                    if hooks:
                        self.sharded[index]._post_accumulate_grad_hooks = hooks
                    original._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                self._mark_stale(original, index, "before fully_shard")
        self.install(self.sharded)

    def take_over(self, sharded: Sequence[nn.Parameter]) -> None:
        """Use existing sharded parameters, which optimizers refer to, in place of the new ones.

        Args:
            sharded: Sharded parameters of the same shapes, from another group.
        """
        for index, (param, made) in enumerate(zip(sharded, self.sharded, strict=True)):
            cast("UnevenDTensor", param).move(self.views[index], cast("UnevenDTensor", made))
            self.sharded[index] = param
        self.install(self.sharded)

    def add_site(self, index: int, module: nn.Module, attribute: str) -> None:
        """Register a parameter on one more module.

        Args:
            index: Index of the parameter.
            module: Module to register it on.
            attribute: Name of the parameter on the module.
        """
        site = (index, weakref.ref(module), attribute)
        if site not in self._sites:
            self._sites.append(site)
        module._parameters[attribute] = self.sharded[index]

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Register these parameters on all modules, in place of whatever is registered."""
        for index, module, attribute in self.sites():
            module._parameters[attribute] = params[index]

    def swap(
        self,
        old: Sequence[nn.Parameter],
        new: Sequence[nn.Parameter],
        only: nn.Module | None = None,
    ) -> bool:
        """Replace registered parameters by other parameters.

        Parameters that user code assigned since they were registered stay. Bypasses
        `nn.Module.__setattr__`, whose checks take longer than a small forward.

        Args:
            old: Registered parameters, one per parameter of the group.
            new: Parameters to register.
            only: Module on which they are replaced; None for all modules.

        Returns:
            Whether there were any.
        """
        found = False
        for index, module_ref, attribute in self._sites:
            module = module_ref()
            if module is not None and (only is None or module is only):
                registered = module._parameters
                if registered.get(attribute) is old[index]:
                    registered[attribute] = new[index]
                    found = True
        return found

    def sites(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Yield where parameters are registered: index, module, name of the parameter there."""
        for index, module_ref, attribute in self._sites:
            module = module_ref()
            if module is not None:
                yield index, module, attribute

    def mark_live(self) -> None:
        """Allow operations on gathered parameters, which have memory now."""
        for param, cls in self._live:
            param.__class__ = cls

    def mark_freed(self) -> None:
        """Make operations on gathered parameters raise, since their memory is freed."""
        for param, cls in self._freed:
            param.__class__ = cls

    def note_written(self) -> None:
        """Note that changes of gathered weights until now are those of gathers and formats."""
        self._versions = [param._version for param in self.gathered]

    def advance_versions(self) -> None:
        """Let autograd reject tensors that it saved of gathered weights with earlier values."""
        torch.autograd.graph.increment_version(self.gathered)
        self._versions = [version + 1 for version in self._versions]

    def find_written(self) -> str:
        """Return the name of a gathered weight that other code changed in place, or ""."""
        before, found = self._versions, [param._version for param in self.gathered]
        if found == before:
            return ""
        pairs = zip(found, before, strict=True)
        return self.label(next(i for i, (now, then) in enumerate(pairs) if now != then))

    # -- requires_grad ------------------------------------------------------------------------

    def copy_requires_grad_to_gathered(self) -> None:
        """Set `requires_grad` of gathered parameters to that of the sharded ones."""
        with plain_attributes():
            self._trained = list(map(raw_requires_grad, self.sharded))
            is_changed = self._trained != list(map(raw_requires_grad, self.gathered))
        if is_changed:
            for gathered, is_trained in zip(self.gathered, self._trained, strict=True):
                gathered.requires_grad_(is_trained)

    def has_changed_requires_grad(self) -> bool:
        """Return whether gathered parameters were frozen or unfrozen while registered.

        Between a forward and its backward, `module.requires_grad_()` changes the gathered
        parameters.
        """
        with plain_attributes():
            return self._trained != list(map(raw_requires_grad, self.gathered))

    def copy_requires_grad_to_sharded(self) -> None:
        """Set `requires_grad` of sharded parameters to that of the gathered ones."""
        for sharded, gathered in zip(self.sharded, self.gathered, strict=True):
            sharded.requires_grad_(gathered.requires_grad)

    # -- external changes ---------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Return version counters, which advance at in-place operations.

        They cover operations on the parameters, on `to_local()` and on the flat main weight.
        """
        with plain_attributes():
            # Local rows are looked up each time, since assigning `data` replaces them.
            tensors = (self._main_weight.tensor, *self.sharded, *map(local_of, self.sharded))
            return (self._num_moves, *map(raw_version, tensors))

    def check_hooks(self) -> None:
        """Check that no parameter has a `register_hook` hook, which would never be called.

        Raises:
            RuntimeError: A parameter has one.
        """
        with plain_attributes():
            for index, param in enumerate(self.sharded):
                rejection = raw_hooks(param) and tensor_hook_rejection(self.label(index), param)
                if rejection:
                    raise RuntimeError(rejection)

    def check_gradients(self) -> None:
        """Check gradients that the program assigned.

        Raises:
            RuntimeError: A gradient was assigned to a gathered weight, where it would not be
                reduced; or a plain tensor is the gradient of a sharded parameter.
        """
        with plain_attributes():
            kinds = set(map(type, map(raw_grad, self.sharded)))
        if not kinds <= {UnevenDTensor, type(None)}:
            for param in self.sharded:
                sharded_grad(param)
        for index, param in enumerate(self.gathered):
            if param.grad is not None:
                raise RuntimeError(
                    f"a gradient was assigned to the gathered weight of {self.label(index)} "
                    "outside of autograd, where it is neither reduced nor stepped; modules that "
                    "compute weight gradients later (Transformer Engine's delay_wgrad_compute) "
                    "need a schedule that reports when all have arrived (ScheduledUnits); without "
                    "a schedule, disable that option"
                )

    def sync(self) -> None:
        """Apply changes that user code made to parameters after they were sharded.

        Raises:
            ValueError: A change of shape, dtype or identity is not supported.
        """
        self.restore_replaced()
        is_changed = list(map(operator.is_not, map(local_of, self.sharded), self.views))
        if any(is_changed):
            self._adopt_assigned([index for index, each in enumerate(is_changed) if each])

    def restore_replaced(self, *, adopts: bool = True) -> None:
        """Register sharded parameters where other tensors are registered, with their values.

        Args:
            adopts: Whether a DTensor of the same rows becomes the sharded parameter itself.

        Raises:
            ValueError: A change of shape, dtype or identity is not supported.
        """
        found = self.replaced()
        replaced: dict[int, Any] = {}
        for index, module, attribute, other in found:
            place, first = f"{attribute} of {type(module).__name__}", replaced.get(index)
            if first is None or other is None:
                self._replace(index, place, other, adopts=adopts)
                replaced[index] = other
            elif other is not first and not torch.equal(plain_of(first), plain_of(other)):
                raise ValueError(
                    f"parameter {self.label(index)} is tied, and was replaced by tensors of "
                    f"different values ({place} is one); untie it before sharding it"
                )
            # Through `__setattr__`, since an RNN keeps a list of the parameters set on it.
            setattr(module, attribute, self.gathered[index])
        if found:
            self.install(self.sharded)

    def leave_site(self, module: nn.Module, attribute: str) -> None:
        """Stop registering a parameter on a module. Without any module, it is frozen."""
        found = next(s for s in self._sites if s[1]() is module and s[2] == attribute)
        self._sites.remove(found)
        if not any(index == found[0] for index, _, _ in self._sites):
            self.sharded[found[0]].requires_grad_(False)

    def replaced(self) -> list[tuple[int, nn.Module, str, torch.Tensor | None]]:
        """Return sites with another tensor: index, module, name, registered tensor."""
        found: list[tuple[int, nn.Module, str, torch.Tensor | None]] = []
        # A loop without `sites`: it runs at every use.
        for index, module_ref, attribute in self._sites:
            module = module_ref()
            if module is not None:
                param = module._parameters.get(attribute)
                if param is not self.sharded[index] and param is not self.gathered[index]:
                    found.append((index, module, attribute, param))
        return found

    def _adopt_assigned(self, changed: Sequence[int]) -> None:
        """Copy local tensors that user code assigned into the main weight, and use it again.

        The main weight moves to new memory before: tensors that share memory with the parameters
        from before the assignment (`backup = param.data`) keep their values, as in torch.

        Args:
            changed: Indices of the parameters.
        """
        assigned = [(index, local_of(self.sharded[index])) for index in changed]
        for index, local in assigned:
            self._check_rows(index, local)
        if any(local.data_ptr() != self.views[index].data_ptr() for index, local in assigned):
            # A later training could not modify tensors made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._main_weight.reallocate()
                self._num_moves += 1
                self.views[:] = map(self._main_weight.view, range(len(self.views)))
                for index, part in self._in_main_weight:
                    set_data(part, self.views[index])
                for index, local in assigned:
                    self.views[index].copy_(local)
        for param, view in zip(self.sharded, self.views, strict=True):
            cast("UnevenDTensor", param)._local_tensor = view

    def _check_rows(self, index: int, local: torch.Tensor) -> None:
        """Raise if a local tensor cannot be copied into the main weight."""
        view = self.views[index]
        if local.dtype != view.dtype or local.shape != view.shape or local.device != view.device:
            raise ValueError(
                f"parameter {self.label(index)} was changed after fully_shard: "
                f"from {tuple(view.shape)} {view.dtype} {view.device} here to "
                f"{tuple(local.shape)} {local.dtype} {local.device}; convert a model before "
                "sharding it, and set compute dtypes with a MixedPrecisionPolicy"
            )

    def _replace(self, index: int, place: str, other: torch.Tensor | None, *, adopts: bool) -> None:
        """Copy the values of a registered replacement, or use the replacement itself."""
        own = self.sharded[index]
        name = f"parameter {self.label(index)} (registered as {place})"
        if other is None:
            raise ValueError(f"{name} was removed after fully_shard; remove it before")
        if not isinstance(other, nn.Parameter) or _in_functional_call():
            raise ValueError(
                f"{name} was replaced for one call (torch.func.functional_call), and a sharded "
                "module computes with its own parameters; to run it with other values, load them "
                "with load_state_dict, run it, and load its own back"
            )
        if self._belongs_elsewhere(other, index):
            raise ValueError(
                f"{name} was tied to another one after fully_shard; tie them before, or register "
                "the same sharded parameter twice before the first forward"
            )
        if other.shape != own.shape:
            raise ValueError(
                f"{name} was replaced after fully_shard: shape {tuple(own.shape)} before, "
                f"{tuple(other.shape)} now; build the model as it should be before sharding it"
            )
        if not adopts or not isinstance(other, UnevenDTensor) or other.row_shards.saved:
            if other.dtype != own.dtype:
                raise ValueError(
                    f"{name} changed from {own.dtype} to {other.dtype}; keep its dtype"
                )
            own.data = other
            own.requires_grad_(other.requires_grad)
            self._mark_stale(other, index, "before the parameter was sharded again")
            return
        if other.row_shards != self.row_shards[index]:
            raise ValueError(f"{name} was replaced by a DTensor that is sharded differently")
        self._check_rows(index, local_of(other))
        propagate_attributes(own, other)
        # From here on, it belongs to this group only: another group does not adopt it too.
        other.row_shards = self.row_shards[index]
        self.sharded[index] = other
        self._mark_stale(own, index, "before the parameter was replaced")

    def _belongs_elsewhere(self, param: nn.Parameter, index: int) -> bool:
        """Return whether a tensor is, or was, another parameter than this one."""
        slot = find_owner_slot(param)
        if slot is not None:
            return slot.info is not self._info or slot.index != index
        if not isinstance(param, UnevenDTensor):
            return False
        group: Any = param.row_shards.info.owner()
        return group is not None and any(param is known for known in group.sharded_params)

    def _mark_stale(self, param: torch.Tensor, index: int, used: str) -> None:
        """Mark a replaced tensor as stale: a gradient that reaches it is an error.

        A module that also holds the tensor outside its registered parameters would compute with it,
        though it is neither gathered nor stepped; no other check detects that.

        Args:
            param: The replaced tensor.
            index: Index of its parameter.
            used: When the tensor was in use, for error messages.
        """
        slot = OwnerSlot(self._info, index, self.names[index], used)
        _STALE[param] = slot
        _STALE.num_marked += 1
        if param.requires_grad and param.is_leaf:
            hook = InternalHook(_refuse_gradient, slot.label)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class OwnerSlot:
    """The parameter that a stale tensor was.

    Attributes:
        info: Information about the group.
        index: Index of the parameter in the group.
        name: Name of the parameter.
        used: When the tensor was in use, such as `before fully_shard`.
    """

    info: GroupInfo
    index: int
    name: str
    used: str

    @property
    def label(self) -> str:
        """Name of the tensor for error messages."""
        return f"{self.name} of {self.info.name} as it was {self.used}"


class _StaleParameters(WeakIdKeyDictionary):
    """Weak dictionary from stale parameters to their owner slots; a copy of a parameter has none.

    Parameters in use are not in the dictionary: torch swaps their contents (`module.to()`), which
    raises if a weak reference exists.

    Attributes:
        num_marked: How many parameters were marked stale so far.
    """

    num_marked = 0


_STALE = _StaleParameters()


def _refuse_gradient(name: str, param: torch.Tensor) -> None:
    param.grad = None
    raise RuntimeError(
        f"a gradient arrived for {name}: some code keeps that tensor and computes with "
        "it instead of the module's registered parameter. Look the parameter up on its module in "
        "every forward, or leave it out with ignored_params"
    )


def num_stale() -> int:
    """Return the number of parameters that were marked stale so far, which caches compare."""
    return _STALE.num_marked


def find_owner_slot(param: torch.Tensor) -> OwnerSlot | None:
    """Return the owner slot of a stale parameter; None if not stale or if its group was deleted."""
    slot: OwnerSlot | None = _STALE.get(param)  # type: ignore[no-untyped-call]
    return None if slot is None or slot.info.owner() is None else slot


def _in_functional_call() -> bool:
    """Return whether the caller runs inside `torch.func.functional_call`.

    `functional_call` writes tensors to a module's parameter table for one call; only the stack
    distinguishes that from an assignment. Called only if a parameter was replaced.
    """
    frames = traceback.walk_stack(inspect.currentframe())
    return any(frame.f_code is stateless._functional_call.__code__ for frame, _ in frames)


# -- attributes and hooks of users ------------------------------------------------------------

_OWN_ATTRIBUTES = frozenset(
    {"_is_param", "row_shards", "_local_tensor", "_spec", "_owner_slot"}
    | {"main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "get_main_grad"}
)


def propagate_attributes(
    source: torch.Tensor, target: torch.Tensor, besides: AbstractSet[str] = frozenset()
) -> None:
    """Copy a parameter's attributes, the content of its `__dict__`, to another parameter.

    Copies all names, since model code sets attributes (`sequence_parallel`, `allreduce`, ...) that
    optimizers read. Attributes of torch and of this package are skipped. A method bound to the
    source is bound to the target; otherwise it would keep the source alive.

    Args:
        source: Parameter to copy from.
        target: Parameter to copy to.
        besides: Further names to skip.
    """
    for name, value in vars(source).items():
        if name in _OWN_ATTRIBUTES or name in besides:
            continue
        if inspect.ismethod(value) and value.__self__ is source:
            value = types.MethodType(value.__func__, target)  # noqa: PLW2901
        setattr(target, name, value)


def tensor_hook_rejection(name: str, param: torch.Tensor) -> str:
    """Return an error message for a parameter with a `Tensor.register_hook` hook, or "".

    Such a hook receives the gradient of one backward before accumulation and may replace it.
    Sharded parameters may accumulate several backwards before the reduction, so no reduced gradient
    of one backward exists.
    """
    hooks: dict[int, Any] = param._backward_hooks or {}
    if all(isinstance(hook, InternalHook) for hook in hooks.values()):
        return ""
    return (
        f"{name} has a hook of register_hook(), which no gradient of a sharded parameter would "
        "reach; use register_post_accumulate_grad_hook(), which is called once param.grad is "
        "reduced and may change it, or put the hook on a tensor in the forward"
    )
