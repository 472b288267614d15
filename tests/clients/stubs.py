"""Stubs for packages that a library imports and that no test calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Stub(ModuleType):
    """A module in which every name is a class whose call returns None."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__new__": lambda cls, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], modules: Sequence[str]) -> None:
        self._packages, self._modules = packages, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_stubbed = any(f"{name}.".startswith(f"{package}.") for package in self._packages)
        if is_stubbed or name in self._modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stub(packages: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Stub packages in this process and those forked from it.

    Args:
        packages: Packages with all of their submodules, unless they are installed.
        modules: Modules without their other submodules, also if they are installed.
    """
    sys.meta_path.append(_StubFinder(packages, ()))
    sys.meta_path.insert(0, _StubFinder((), modules))
