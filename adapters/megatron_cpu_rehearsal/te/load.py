"""Imports Transformer Engine's Python package with the reference kernels.

Without kernels, the import of the pure Python wheel raises an error that Megatron does not handle.
The wheel is therefore in a separate folder of the environment, which this module adds to
`sys.path`. A package that is already on `sys.path` is also supported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from megatron_cpu_rehearsal.errors import RehearsalError
from megatron_cpu_rehearsal.te import apex, module
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT
from megatron_fsdp_v2_patching import Patches, environment

__all__ = [
    "FOLDER",
    "TESTED_VERSION",
    "find",
    "kept_out",
    "loaded",
    "version_in",
    "why_not",
    "why_not_installed",
]

TESTED_VERSION = "2.20"
"""Version of Transformer Engine, without the patch level, whose kernels are emulated."""

FOLDER = "rehearsal-packages"
"""Folder of an environment (`sys.prefix`) with Transformer Engine's Python package."""

_PACKAGE = "transformer_engine"
_DISTRIBUTION = "transformer_engine"
# The first variable prevents the package from loading shared libraries; the second would override
# the first.
_BUILDING = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}


def find() -> Path | None:
    """Return the folder with Transformer Engine's Python package, or None if there is none."""
    folders = [Path(sys.prefix) / FOLDER, *(Path(entry or ".") for entry in sys.path)]
    for folder in folders:
        if (folder / _PACKAGE / "pytorch" / "__init__.py").is_file():
            return folder
    return None


def version_in(folder: Path) -> str | None:
    """Return the version of the Transformer Engine in a folder, or None if it is unknown."""
    for found in metadata.distributions(name=_DISTRIBUTION, path=[str(folder)]):
        return found.version
    return None


def why_not_installed() -> str | None:
    """Return the reason why no supported Transformer Engine is installed, or None if one is."""
    folder = find()
    if folder is None:
        return (
            "Transformer Engine's Python package is not installed, neither in "
            f"{Path(sys.prefix) / FOLDER} nor on sys.path"
        )
    version = version_in(folder)
    if version is None or version.split(".")[:2] != TESTED_VERSION.split("."):
        return (
            f"the rehearsal's kernels are those of Transformer Engine {TESTED_VERSION}, and "
            f"{version or 'an unknown version'} is installed"
        )
    return None


def why_not() -> str | None:
    """Return the reason why this process cannot load Transformer Engine, or None if it can."""
    reason = why_not_installed()
    if reason is not None:
        return reason
    extensions = sys.modules.get("megatron.core.extensions.transformer_engine")
    if extensions is not None and not extensions.HAVE_TE:
        return "Megatron was imported without Transformer Engine before the rehearsal began"
    return None


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Make Transformer Engine importable, with the reference kernels.

    Map devices to the CPU first, since the import of Transformer Engine queries them. The end of
    the context reverts all patches and `sys.path`. The imported modules remain, since Megatron's
    modules reference their classes, and their torch operators can be defined only once.

    Raises:
        RehearsalError: No supported version of Transformer Engine is installed.
    """
    reason, folder = why_not(), find()
    if reason is not None or folder is None:
        raise RehearsalError(f"--transformer-impl transformer_engine: {reason}")
    patches = Patches()
    with contextlib.ExitStack() as stack:
        stack.callback(patches.undo)
        if str(folder) not in sys.path:
            # Appended last, so that packages of the environment take precedence.
            sys.path.append(str(folder))
            stack.callback(sys.path.remove, str(folder))
        for kernels in (module, apex):
            if kernels.NAME not in sys.modules:
                sys.modules[kernels.NAME] = kernels.make()
        with environment(_BUILDING):
            _import_without_kernels(patches)
        yield


@contextlib.contextmanager
def kept_out() -> Iterator[None]:
    """Prevent imports of Transformer Engine, as if it were not installed.

    Megatron imports Transformer Engine if it is installed, and fails with the pure Python wheel.
    """
    if _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is None:
        yield
        return
    hidden: dict[str, None] = {_PACKAGE: None}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.modules.pop(_PACKAGE, None)


def _import_without_kernels(patches: Patches) -> None:
    """Import the package, after patching the function that would load shared libraries."""
    if _PACKAGE in sys.modules:
        for patch in BEFORE_IMPORT:
            patches.apply(patch)
        return
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.loader is not None
    try:
        package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        for patch in BEFORE_IMPORT:
            patches.apply(patch)
        spec.loader.exec_module(package)
        # The package also imports this module, but ignores import errors.
        importlib.import_module(f"{_PACKAGE}.pytorch")
    except BaseException:
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
        raise
