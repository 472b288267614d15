"""Replacing attributes and environment variables, and putting them back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced so far, in order, with what it was."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._added_variables: list[str] = []

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
