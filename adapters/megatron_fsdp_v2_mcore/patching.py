"""One record for every attribute that is replaced, and the registry that puts originals back.

The lists are in `patches.py` (Megatron, for every training), `rehearsal/patches.py` (what no CPU
gets past) and `rehearsal/te/patches.py` (the same of Transformer Engine).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "Patches", "environment"]


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables for as long as the context lasts.

    Args:
        values: By name; what others were is put back.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_ABSENT = object()
_OPTIONAL = ("megatron.training", "transformer_engine")


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that is replaced.

    Attributes:
        name: Short name.
        target: `module:attribute`, or `module:Class.attribute`.
        reason: Why it has to be replaced.
        parameters: Leading parameter names that the original must have.
        replace: Makes the replacement from the original.
        selected: Whether it waits for the command line to select this package.
    """

    name: str
    target: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Any], Any]
    selected: bool = False

    def find(self) -> tuple[Any, str] | None:
        """The object the attribute belongs to, and the attribute.

        Returns:
            None where the module is part of `megatron.training`, which some installations of
            megatron-core lack, or of Transformer Engine.

        Raises:
            AttributeError: The module exists and the attribute does not.
        """
        module_name, _, path = self.target.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(_OPTIONAL):
                return None
            raise
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        if not hasattr(owner, attribute):
            raise AttributeError(f"there is no {self.target}")
        return owner, attribute


class Patches:
    """What was replaced so far, in order, with what it was."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._added_variables: list[str] = []

    def apply(self, patch: Patch) -> None:
        """Put a patch in place; nothing happens where its module is not installed.

        Raises:
            AttributeError: There is no such attribute.
        """
        found = patch.find()
        if found is not None:
            self.set(*found, patch.replace(getattr(*found)))

    def holds(self, owner: Any, name: str) -> bool:
        """Whether an attribute is replaced already."""
        return any(owner is other and name == known for other, known, _ in self._originals)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`, or create it."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def default_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables that are not set."""
        for name, value in variables.items():
            if name not in os.environ:
                os.environ[name] = value
                self._added_variables.append(name)

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        for name in self._added_variables:
            os.environ.pop(name, None)
        self._added_variables.clear()
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
