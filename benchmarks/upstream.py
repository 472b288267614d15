"""Megatron-FSDP from PyPI's `megatron-fsdp`, on GPUs or on this machine's CPU.

`make bench` installs the package into a separate folder that only this module uses. Without it,
this module uses the copy inside megatron-core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_cpu_rehearsal.cuda_stubs import install_stubs
from megatron_cpu_rehearsal.devices import CpuDevices
from megatron_fsdp_v2_patching import Patches

__all__ = ["experimental", "mapped_to", "package", "version"]

FOLDER = Path(f"{sys.prefix}-peers")
_NAMES = ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")


@functools.cache
def package() -> Any:
    """Return the package.

    Raises:
        ModuleNotFoundError: Neither the package nor megatron-core is installed.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return _imported("")


@functools.cache
def experimental() -> Any:
    """Return the second version of Megatron-FSDP, called experimental."""
    package()
    return _imported(".experimental")


def version() -> str:
    """Return the name and version of the package."""
    name = "megatron-fsdp" if package().__name__ == _NAMES[0] else "megatron-core's Megatron-FSDP"
    return f"{name} {package().__version__}"


def _imported(part: str) -> Any:
    with warnings.catch_warnings(), _without_remarks():
        # Importing Megatron warns about every missing optional package.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(_NAMES[0] + part)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != _NAMES[0]:
                raise
            return importlib.import_module(_NAMES[1] + part)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def mapped_to(device: str, *, building: bool = False) -> Iterator[None]:
    """Run code that requires a GPU: on a GPU, or on the stubs of a rehearsal.

    Args:
        device: Type of the device.
        building: Whether to map CUDA devices to the CPU in calls of torch. Building a model needs
            this mapping, which slows down every call. Steps do not name devices.
    """
    if device == "cuda":
        yield
        return
    patches = Patches()
    try:
        install_stubs(patches)
        with _without_remarks(), CpuDevices() if building else contextlib.nullcontext():
            yield
    finally:
        patches.undo()
