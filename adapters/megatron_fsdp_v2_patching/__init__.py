"""A record of each attribute that is replaced, and the registry that restores the originals.

The packages that patch another one share these two classes: `megatron_fsdp_v2_mcore` and the CPU
rehearsal (Megatron), and `megatron_fsdp_v2_for` (other frameworks).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "Patches", "environment"]


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside this context, and restore them at its end.

    Args:
        values: Values by name.
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
    """The replacement of one attribute.

    Attributes:
        target: `module:attribute`, or `module:Class.attribute`.
        reason: Reason of the replacement.
        wrap: `module:function` that makes the replacement from the original.
        replace: `module:name` of the replacement, if it does not depend on the original.
        name: Short name; by default the name of the attribute.
        parameters: Leading parameter names that the original must have.
        selected: Whether the patch is applied only if the command line selects its package.
        optional: Whether the patch is left out if importing the module fails, for example since it
            needs a package that is not installed. Nothing uses the module then.
    """

    target: str
    reason: str
    wrap: str = ""
    replace: str = ""
    name: str = ""
    parameters: tuple[str, ...] = ()
    selected: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.target.partition(":")[2])

    def find(self) -> tuple[Any, str] | None:
        """Find the object that owns the attribute, and the attribute's name.

        Returns:
            None if the module is part of `megatron.training` or of Transformer Engine and is not
            installed; some installations of megatron-core lack `megatron.training`. None also if
            the patch is optional and importing the module fails.

        Raises:
            AttributeError: The module exists and the attribute does not.
            ImportError: Importing the module fails.
        """
        name, _, path = self.target.partition(":")
        *parents, attribute = path.split(".")
        try:
            module = importlib.import_module(name)
        except Exception as error:
            missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
            if self.optional or missing.startswith(_OPTIONAL):
                return None
            raise ImportError(f"{name} cannot be imported: {error!r}") from error
        try:
            owner = functools.reduce(getattr, parents, module)
            getattr(owner, attribute)
        except AttributeError as error:
            raise AttributeError(f"there is no {self.target}") from error
        return owner, attribute

    def check(self, versions: str) -> bool:
        """Check that the target exists and takes the expected parameters.

        Args:
            versions: The installed and the supported versions, for the error.

        Returns:
            Whether the module of the target is installed.

        Raises:
            RuntimeError: The patch does not fit.
        """
        try:
            found = self.find()
            if found is not None and self.parameters:
                self._check_parameters(getattr(*found))
        except (AttributeError, ImportError, TypeError) as error:
            raise RuntimeError(f"patch {self.name!r} does not fit: {error}. {versions}") from error
        return found is not None

    def _check_parameters(self, original: Any) -> None:
        # The signature of a class is the signature of its constructor without self.
        names = list(inspect.signature(original).parameters)
        if tuple(names[: len(self.parameters)]) != self.parameters:
            raise TypeError(
                f"{self.target} takes ({', '.join(names)}), expected "
                f"({', '.join(self.parameters)}, ...)"
            )

    def replacement(self, original: Any, *args: Any) -> Any:
        """Make the replacement.

        Args:
            original: The current value of the attribute.
            args: Further arguments of the function that `wrap` names.
        """
        if self.replace:
            return _named(self.replace)
        return _named(self.wrap)(original, *args)


def _named(path: str) -> Any:
    """Return the object that `module:attribute` names."""
    module, _, attributes = path.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))


class Patches:
    """Registry of replaced attributes with their originals, in the order of replacement."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._patches: list[Patch] = []
        self._added_variables: list[str] = []

    def apply(self, patch: Patch, *args: Any) -> None:
        """Apply a patch, unless its module is not installed.

        Args:
            patch: The patch.
            args: See `Patch.replacement`.

        Raises:
            AttributeError: The attribute does not exist.
        """
        found = patch.find()
        if found is not None:
            self.set(*found, patch.replacement(getattr(*found), *args))
            self._patches.append(patch)

    def holds(self, patch: Patch) -> bool:
        """Return whether a patch is applied."""
        return patch in self._patches

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`, or create it."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def default_environment(self, variables: Mapping[str, str]) -> None:
        """Set the environment variables that the user has not set."""
        for name, value in variables.items():
            if name not in os.environ:
                os.environ[name] = value
                self._added_variables.append(name)

    def undo(self) -> None:
        """Restore the environment and all originals, last replacement first."""
        for name in self._added_variables:
            os.environ.pop(name, None)
        self._added_variables.clear()
        self._patches.clear()
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
