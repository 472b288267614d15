"""Importing Transformer Engine's Python over the reference kernels.

Its pure Python wheel refuses to be imported alone, and does so in a way that Megatron does not
expect. So it is kept where nothing else finds it, in a folder of its own beside the environment's
packages, and is put on the path here. Where it is installed like any package, that is used.
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
from megatron_cpu_rehearsal.patching import Patches, environment
from megatron_cpu_rehearsal.te import apex, module
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT

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
"""Versions of Transformer Engine, without the patch level, whose kernels these are."""

FOLDER = "rehearsal-packages"
"""Folder of an environment (`sys.prefix`) that has Transformer Engine's Python."""

_PACKAGE = "transformer_engine"
_DISTRIBUTION = "transformer_engine"
# With the first variable its package looks for no shared libraries; the second would override it.
_BUILDING = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}


def find() -> Path | None:
    """The folder with Transformer Engine's Python package, or None where there is none."""
    folders = [Path(sys.prefix) / FOLDER, *(Path(entry or ".") for entry in sys.path)]
    for folder in folders:
        if (folder / _PACKAGE / "pytorch" / "__init__.py").is_file():
            return folder
    return None


def version_in(folder: Path) -> str | None:
    """Version of the Transformer Engine in a folder; None where it does not say."""
    for found in metadata.distributions(name=_DISTRIBUTION, path=[str(folder)]):
        return found.version
    return None


def why_not_installed() -> str | None:
    """Why there is no Transformer Engine these kernels are for, or None where there is."""
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
            f"{version or 'a version that does not say its number'} is installed"
        )
    return None


def why_not() -> str | None:
    """Why this process cannot load Transformer Engine, in one sentence, or None where it can."""
    reason = why_not_installed()
    if reason is not None:
        return reason
    extensions = sys.modules.get("megatron.core.extensions.transformer_engine")
    if extensions is not None and not extensions.HAVE_TE:
        return "Megatron was imported without Transformer Engine before the rehearsal began"
    return None


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Make Transformer Engine importable, over the reference kernels.

    Devices have to be mapped to the CPU already, since it looks at them when it is imported. At the
    end every patch is undone and the path is as before. The imported modules stay: Megatron's hold
    their classes, and torch's operators that they define can be defined only once.

    Raises:
        RehearsalError: It is not installed, in a version whose kernels these are.
    """
    reason, folder = why_not(), find()
    if reason is not None or folder is None:
        raise RehearsalError(f"--transformer-impl transformer_engine: {reason}")
    patches = Patches()
    with contextlib.ExitStack() as stack:
        stack.callback(patches.undo)
        if str(folder) not in sys.path:
            # Last: whatever else it brings along is taken from the environment if that has it.
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
    """Make Transformer Engine not importable, as if it was not installed.

    Megatron uses it wherever it can be imported, and its pure Python wheel alone fails there.
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
    """Import the package; its part that would load shared libraries comes first, and is patched."""
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
        # The package imports it as well, and says nothing where that fails.
        importlib.import_module(f"{_PACKAGE}.pytorch")
    except BaseException:
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
        raise
