"""Transformer Engine's layers, Megatron's default, in a rehearsal: selection and trainings."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_cpu_rehearsal import RehearsalError
from megatron_cpu_rehearsal.flags import transformer_impl, with_cpu_flags
from megatron_cpu_rehearsal.te import load
from tests.mcore.flags import LOCAL, TRANSFORMER_ENGINE, fsdp
from tests.mcore.session import distance
from tests.mcore.trained import trained
from tests.ranks import RankPools


def _classes(model: Any, optimizer: Any) -> list[str]:
    """Return the names of Transformer Engine's classes among modules and optimizers."""
    found = {type(module) for chunk in model for module in chunk.modules()}
    found |= {
        type(each.optimizer) for each in getattr(optimizer, "chained_optimizers", [optimizer])
    }
    bases = {base for kind in found for base in kind.__mro__}
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in bases}
    return sorted(name for name in names if name.startswith("transformer_engine."))


STEPS = "--global-batch-size 8 --train-iters 4"


def test_default_layers_match_megatrons_own(megatron: RankPools, megatron_te: RankPools) -> None:
    """Weights of equal shapes are drawn in the same order, so their initial values are equal."""
    theirs = trained(megatron_te, 2, TRANSFORMER_ENGINE, STEPS, probe=_classes)
    own = trained(megatron, 2, STEPS)
    assert distance(own.losses, theirs.losses) <= 1e-6
    wanted = ("LayerNormLinear", "Linear", "DotProductAttention", "LayerNorm", "FusedAdam")
    assert {f"transformer_engine.{name}" for name in wanted} <= set(theirs.extras[0])


@pytest.mark.functional
def test_fused_weight_gradients_are_not_bitwise_identical_in_bf16(megatron_te: RankPools) -> None:
    """The functional matrix compares fused and unfused gradients in fp32, where they are equal."""
    flags = [TRANSFORMER_ENGINE, STEPS, "--bf16", fsdp()]
    apart = trained(megatron_te, 2, *flags, "--no-gradient-accumulation-fusion")
    assert trained(megatron_te, 2, *flags).losses != apart.losses


# -------------------------------------------------------------------------------------- selection


def _fake(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """Create the files of Transformer Engine that are read before it is imported."""
    monkeypatch.setattr(sys, "prefix", str(folder))
    # Other tests of this process may have imported Megatron, which decides for the process.
    monkeypatch.delitem(sys.modules, "megatron.core.extensions.transformer_engine", raising=False)
    package = folder / load.FOLDER / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    info = folder / load.FOLDER / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    )


def test_untested_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, tmp_path, "2.99.1")
    message = "kernels are those of Transformer Engine 2.20, and 2.99.1 is installed"
    with pytest.raises(RehearsalError, match=message):
        with_cpu_flags(TRANSFORMER_ENGINE)
    with pytest.raises(RehearsalError, match=message), load.loaded():
        pass
    assert transformer_impl([]) == "local"


def test_without_transformer_engine_megatrons_own_layers_are_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "find", lambda: None)
    added = with_cpu_flags([])
    assert added[:2] == LOCAL
    assert {"--no-persist-layer-norm", "--no-gradient-accumulation-fusion"} <= set(added)
    with pytest.raises(RehearsalError, match="is not installed"):
        with_cpu_flags(TRANSFORMER_ENGINE)


def test_installed_transformer_engine_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(monkeypatch, tmp_path, "2.20.7")
    added = with_cpu_flags([])
    assert added[:2] == TRANSFORMER_ENGINE
    assert not {"--no-persist-layer-norm", "--no-gradient-accumulation-fusion"} & set(added)
    assert "--no-gradient-accumulation-fusion" in with_cpu_flags(LOCAL)


def test_features_that_need_fused_attention_use_megatrons_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(monkeypatch, tmp_path, "2.20.2")
    context = ["--context-parallel-size", "2"]
    assert (
        transformer_impl(context) == transformer_impl(["--hybrid-layer-pattern", "M*"]) == "local"
    )
    assert transformer_impl(["--context-parallel-size", "1"]) == "transformer_engine"
    with pytest.raises(RehearsalError, match="cuDNN's or flash attention"):
        with_cpu_flags([*context, *TRANSFORMER_ENGINE])


def test_wheel_without_its_extension_is_hidden_from_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('not without its extension')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with load.kept_out(), pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
    with contextlib.suppress(RuntimeError):
        importlib.import_module("transformer_engine")
        pytest.fail("it can be imported")
