"""Megatron's default layers, Transformer Engine's, train sharded as under its own DDP."""

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
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.flags import LOCAL, STRATEGIES, TRANSFORMER_ENGINE, fsdp
from tests.mcore.session import Training, distance
from tests.mcore.trained import assert_close, trained
from tests.ranks import RankPools

STEPS = "--global-batch-size 8 --train-iters 4 --log-params-norm"
MODERN = f"{f.GATED} --disable-bias-linear {f.UNTIED}"
# Blocks of FP8 have 128 elements, so no dimension has fewer.
FP8 = "--bf16 --hidden-size 128 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64"


def _trained(megatron_te: RankPools, *flags: f.Flags) -> Training:
    """A training of the default layers, with the classes that it used."""
    return trained(megatron_te, 2, TRANSFORMER_ENGINE, STEPS, *flags, probe=_classes, once=True)


def _classes(model: Any, optimizer: Any) -> list[str]:
    """Modules and optimizers that were used, by package."""
    found = {type(module) for chunk in model for module in chunk.modules()}
    found |= {
        type(each.optimizer) for each in getattr(optimizer, "chained_optimizers", [optimizer])
    }
    bases = {base for kind in found for base in kind.__mro__}
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in bases}
    return sorted(name for name in names if name.startswith("transformer_engine."))


def _assert_equal(mine: Training, theirs: Training) -> None:
    assert len(mine.losses) == len(mine.params_norms) == 4
    assert mine.losses[0] != mine.losses[-1]
    assert_close(mine, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_default_layers_train_as_under_megatrons_ddp(
    megatron_te: RankPools, strategy: str
) -> None:
    mine = _trained(megatron_te, fsdp(strategy))
    _assert_equal(mine, _trained(megatron_te))
    wanted = ("LayerNormLinear", "Linear", "DotProductAttention", "LayerNorm", "FusedAdam")
    assert {f"transformer_engine.{name}" for name in wanted} <= set(mine.extras[0])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(MODERN, id="GQA SwiGLU RMSNorm"),
        pytest.param(f"{f.ALLTOALL} --moe-grouped-gemm", id="grouped experts"),
        longer(f.TP2_SP, id="TP2 SP"),
    ],
)
def test_other_models_train_as_under_megatrons_ddp(megatron_te: RankPools, flags: str) -> None:
    _assert_equal(_trained(megatron_te, flags, fsdp()), _trained(megatron_te, flags))


def test_the_default_layers_compute_what_megatrons_own_do(
    megatron: RankPools, megatron_te: RankPools
) -> None:
    """Weights of equal shapes are drawn in the same order, so they start equal."""
    theirs = _trained(megatron_te)
    own = trained(megatron, 2, STEPS)
    assert distance(own.losses, theirs.losses) <= 1e-6


def test_a_fused_weight_gradient_changes_nothing(megatron_te: RankPools) -> None:
    fused = _trained(megatron_te, fsdp())
    apart = _trained(megatron_te, fsdp(), "--no-gradient-accumulation-fusion")
    assert distance(fused.losses, apart.losses) <= 1e-6


@pytest.mark.functional
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_products_train_under_megatrons_ddp(megatron_te: RankPools, recipe: str) -> None:
    plain = _trained(megatron_te, FP8)
    quantized = _trained(megatron_te, FP8, "--fp8-format hybrid --fp8-recipe", [recipe])
    assert 1e-6 < distance(quantized.losses, plain.losses) < 1e-2
    assert quantized.losses[-1] < quantized.losses[0]


# ------------------------------------------------------------------------------- how it is chosen


def _fake(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """Install a Transformer Engine, as far as one looks before it is imported."""
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


def test_an_untested_version_is_said_and_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_where_it_is_installed_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(monkeypatch, tmp_path, "2.20.7")
    added = with_cpu_flags([])
    assert added[:2] == TRANSFORMER_ENGINE
    assert not {"--no-persist-layer-norm", "--no-gradient-accumulation-fusion"} & set(added)
    assert "--no-gradient-accumulation-fusion" in with_cpu_flags(LOCAL)


def test_what_needs_fused_attention_has_megatrons_own_layers(
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


def test_a_wheel_that_cannot_be_imported_alone_is_kept_from_megatron(
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
