"""Where parameters are registered in a module tree, and who owns them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import stateless
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_v2.dtensor.tp_params import part_of
from megatron_fsdp_v2.params.parameter_hooks import NotAUsersHook

if TYPE_CHECKING:
    import torch

    from megatron_fsdp_v2.dtensor.row_shards import ShardedGroup, TensorShard
    from megatron_fsdp_v2.dtensor.tp_params import DTensorPart

__all__ = [
    "OwnedParameter",
    "OwnerSlot",
    "Registrations",
    "find_owner_slot",
    "in_functional_call",
    "mark_stale",
    "num_retired",
]


@dataclass(slots=True)
class OwnedParameter:
    """A parameter a unit owns, and every place in the unit it is registered at.

    Attributes:
        name: Its (first) name relative to the unit.
        param: The original parameter; dropped once its data is in the buffers.
        sites: `(module, attribute)` pairs; several for tied parameters.
        stood_in: A parameter without memory that stood in for this one, and may still elsewhere.
        tensor: How tensor parallelism cut it, if it was said.
        dtensor: How its module computes with it, where it is a DTensor already.
        is_separate: Whether it has flat buffers of its own.
        values: What its main weight begins with, where that is not asked of its format.
    """

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    stood_in: nn.Parameter | None = None
    tensor: TensorShard | None = None
    dtensor: DTensorPart | None = None
    is_separate: bool = False
    values: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what data parallelism cuts: the parameter, or this rank's part of it."""
        return tuple(part_of(self.param).shape)


@dataclass(frozen=True, slots=True)
class OwnerSlot:
    """The slot of a parameter group that a parameter object stood for, and no longer does.

    Attributes:
        group: The `ParameterGroup`, weakly.
        index: Position in it.
        since: What happened to the object, such as `before fully_shard`.
    """

    group: weakref.ref[ShardedGroup]
    index: int
    since: str


class _Retired:
    """Slots of stale parameters, beside them and not on them: copies have no slot.

    Only of stale ones: torch exchanges the content of parameters in use (`module.to()`), and
    refuses to where a weak reference exists.
    """

    def __init__(self) -> None:
        self.slots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.count = 0


_STALE = _Retired()


def mark_stale(
    param: torch.Tensor, group: ShardedGroup, index: int, since: str, undo: ExitStack | None = None
) -> None:
    """Remember which slot of a group a parameter object stood for, and let no gradient reach it.

    A module that keeps a parameter elsewhere than where it is registered would go on computing
    with it: it is neither gathered nor stepped, and nothing else would ever say so.

    Args:
        param: The parameter.
        group: The `ParameterGroup`.
        index: Position in it.
        since: What happened to the object.
        undo: Forgets the slot again. Hooks are the caller's to restore.
    """
    if undo is not None:
        slot: OwnerSlot | None = _STALE.slots.get(param)  # type: ignore[no-untyped-call]
        undo.callback(_set_slot, param, slot)
    _STALE.slots[param] = OwnerSlot(weakref.ref(group), index, since)
    _STALE.count += 1
    if param.requires_grad and param.is_leaf:
        name = f"{group.names[index]} of {group.name} as it was {since}"
        hook = NotAUsersHook(_refuse_gradient, name)
        param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _set_slot(param: torch.Tensor, slot: OwnerSlot | None) -> None:
    if slot is None:
        _STALE.slots.pop(param, None)  # type: ignore[no-untyped-call]
    else:
        _STALE.slots[param] = slot


def _refuse_gradient(name: str, param: torch.Tensor) -> None:
    param.grad = None
    raise RuntimeError(
        f"a gradient arrived for {name}: some code keeps that tensor and computes with "
        "it past the module it is registered on. Look the parameter up on its module in every "
        "forward, or leave it out with ignored_params"
    )


def num_retired() -> int:
    """How many parameters were stale so far; what was found out before may be out of date."""
    return _STALE.count


def find_owner_slot(param: torch.Tensor) -> tuple[ShardedGroup, OwnerSlot] | None:
    """The living `ParameterGroup` that took a stale parameter's place, if any."""
    slot: OwnerSlot | None = _STALE.slots.get(param)  # type: ignore[no-untyped-call]
    group = None if slot is None else slot.group()
    return None if group is None or slot is None else (group, slot)


def in_functional_call() -> bool:
    """Whether this runs inside `torch.func.functional_call`, which puts other tensors in place.

    It writes to a module's table of parameters and tells nobody, so what it put there looks as if
    it were assigned; the difference is who is calling. To be asked only where something was found.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            return True
        frame = frame.f_back
    return False


class Registrations:
    """The places a group's parameters are registered at.

    Installing goes around `nn.Module.__setattr__`, whose checks cost more than a small forward.
    """

    def __init__(self, owned: Sequence[OwnedParameter]) -> None:
        self._sites = [
            (index, weakref.ref(module), attribute)
            for index, parameter in enumerate(owned)
            for module, attribute in parameter.sites
        ]

    def add(self, index: int, module: nn.Module, attribute: str, undo: ExitStack) -> None:
        """Add one more place for a parameter, unless it is known.

        Args:
            index: Which parameter.
            module: Where.
            attribute: Likewise.
            undo: Takes it away again.
        """
        site = (index, weakref.ref(module), attribute)
        if site not in self._sites:
            self._sites.append(site)
            undo.callback(self._sites.remove, site)

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Register these parameters at every place."""
        for index, module_ref, attribute in self._sites:
            module = module_ref()
            if module is not None:
                module._parameters[attribute] = params[index]

    def unexpected(
        self, expected: Sequence[nn.Parameter]
    ) -> Iterator[tuple[int, nn.Module, str, torch.Tensor | None]]:
        """Places where something else is registered than expected: index, module, name, what."""
        for index, module_ref, attribute in self._sites:
            module = module_ref()
            if module is None:
                continue
            found = module._parameters.get(attribute)
            if found is not expected[index]:
                yield index, module, attribute, found
