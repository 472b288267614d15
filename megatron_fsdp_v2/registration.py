"""Where parameters are registered in a module tree, and who owns them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    import torch

__all__ = ["Home", "OwnedParameter", "Registrations", "claim", "find_home", "num_claims"]


@dataclass(slots=True)
class OwnedParameter:
    """A parameter a unit owns, and every place in the unit it is registered at.

    Attributes:
        name: Its (first) name relative to the unit.
        param: The original parameter; dropped once its data is in the buffers.
        sites: `(module, attribute)` pairs; several for tied parameters.
        stood_in: A parameter without memory that stood in for this one, and may still elsewhere.
    """

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    stood_in: nn.Parameter | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """The slot of a parameter group that a parameter object stands for, or stood for.

    Attributes:
        group: The `ParameterGroup`, weakly.
        index: Position in it.
        is_original: Whether the object is what the module held before it was sharded.
    """

    group: weakref.ref[Any]
    index: int
    is_original: bool


class _Register:
    """Homes by parameter object. Kept beside the parameters, not on them: copies have no home."""

    def __init__(self) -> None:
        self.homes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.num_claims = 0


_REGISTER = _Register()


def claim(param: torch.Tensor, group: object, index: int, *, is_original: bool) -> None:
    """Remember that a parameter object stands (or stood) for a slot of a group."""
    _REGISTER.homes[param] = Home(weakref.ref(group), index, is_original)
    _REGISTER.num_claims += 1


def num_claims() -> int:
    """How often `claim` was called: what was found out about homes may be out of date since."""
    return _REGISTER.num_claims


def find_home(param: torch.Tensor) -> tuple[Any, Home] | None:
    """The living `ParameterGroup` a parameter object belongs to, if any."""
    home: Home | None = _REGISTER.homes.get(param)  # type: ignore[no-untyped-call]
    group = None if home is None else home.group()
    return None if group is None or home is None else (group, home)


class Registrations:
    """The places a group's parameters are registered at.

    Installing goes around `nn.Module.__setattr__`, whose checks cost more than a small forward.
    """

    def __init__(self, owned: Sequence[OwnedParameter]) -> None:
        self._sites = [[(weakref.ref(m), attribute) for m, attribute in p.sites] for p in owned]

    def add(self, index: int, module: nn.Module, attribute: str) -> None:
        """Add one more place for a parameter."""
        self._sites[index].append((weakref.ref(module), attribute))

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Register these parameters at every place."""
        for param, sites in zip(params, self._sites, strict=True):
            for module_ref, attribute in sites:
                module = module_ref()
                if module is not None:
                    module._parameters[attribute] = param

    def strangers(
        self, expected: Sequence[nn.Parameter]
    ) -> Iterator[tuple[int, nn.Module, str, nn.Parameter | None]]:
        """Places where something else is registered than expected: index, module, name, what."""
        for index, (param, sites) in enumerate(zip(expected, self._sites, strict=True)):
            for module_ref, attribute in sites:
                module = module_ref()
                if module is None:
                    continue
                found = module._parameters.get(attribute)
                if found is not param:
                    yield index, module, attribute, found
