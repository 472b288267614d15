"""A framework's module patches the versions that it fits, reports why not, and is undone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_cpu_rehearsal.patching import Patch
from megatron_fsdp_v2_for.adapter import Adapter

NAME = "a_framework"
TARGET = Patch(f"{NAME}:shard", "a test", wrap=f"{__name__}:with_strategy", parameters=("module",))


def with_strategy(original: Any, options: Mapping[str, Any]) -> Any:
    return lambda module: (original(module), options["sharding_strategy"])


def fails(original: Any, options: Mapping[str, Any]) -> Any:
    raise ZeroDivisionError


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a version of a framework of one module."""

    def write(version: str, source: str) -> None:
        (tmp_path / f"{NAME}.py").write_text(source)
        metadata = tmp_path / f"{NAME}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {NAME}\nVersion: {version}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop(NAME, None)


def state_of(module: ModuleType) -> dict[str, Any]:
    return dict(vars(module))


def test_install_replaces_the_targets_and_uninstall_leaves_no_trace(framework: Any) -> None:
    framework("1.3.1", "def shard(module): return module")
    module = importlib.import_module(NAME)
    before = state_of(module)
    adapter = Adapter(NAME, {"1.2": (), "1.3": (TARGET,)})
    for strategy in ("optim", "optim_grads"):
        adapter.install(strategy)
        assert module.shard("model") == ("model", strategy)
    assert {key for key, value in state_of(module).items() if value is not before[key]} == {"shard"}
    installed, other = module.shard, lambda model: model
    module.shard = other
    with pytest.raises(RuntimeError, match=r"takes \(model\), expected \(module, \.\.\.\)"):
        adapter.install("optim")
    assert module.shard is other
    module.shard = installed
    for _ in range(2):
        adapter.uninstall()
        assert state_of(module) == before


def test_patches_that_were_applied_before_an_error_are_removed(framework: Any) -> None:
    framework("1.3.1", "def shard(module): return module\ndef other(module): return module")
    module = importlib.import_module(NAME)
    before = state_of(module)
    fails = Patch(f"{NAME}:other", "a test", wrap=f"{__name__}:fails", parameters=("module",))
    with pytest.raises(ZeroDivisionError):
        Adapter(NAME, {"1.3": (TARGET, fails)}).install("optim")
    assert state_of(module) == before


@pytest.mark.parametrize(
    ("version", "source", "message"),
    [
        ("", "", f"{NAME} is not installed; supported is 1.2.x and 1.3.x"),
        ("1.4.0", "", f"{NAME} 1.4.0 is installed; supported is 1.2.x and 1.3.x"),
        ("1.30", "", f"{NAME} 1.30 is installed"),
        ("1.3", "", f"there is no {NAME}:shard. Installed is {NAME} 1.3; supported is 1.2.x and 1"),
        ("1.3", "def shard(model): ...", "takes (model), expected (module, ...)"),
        ("1.3", "import sys; sys.absent", f"{NAME} cannot be imported: AttributeError(\"module 's"),
        ("1.3", "import absent", f"{NAME} cannot be imported: ModuleNotFoundError("),
    ],
)
def test_what_does_not_fit_is_named_with_its_cause(
    framework: Any, version: str, source: str, message: str
) -> None:
    if version:
        framework(version, source)
    with pytest.raises(RuntimeError) as failed:
        Adapter(NAME, {"1.2": (), "1.3": (TARGET,)}).install("optim")
    assert message in str(failed.value)
    if "cannot be imported" in message:
        cause: BaseException | None = failed.value.__cause__
        assert cause is not None and isinstance(cause.__cause__, (AttributeError, ImportError))
