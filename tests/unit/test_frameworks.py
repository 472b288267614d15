"""A framework's module patches the versions that it fits, reports why not, and is undone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import pytest
import torch

from megatron_fsdp_v2_for import automodel, bridge, megatron_fsdp, torchtitan
from megatron_fsdp_v2_for.adapter import Adapter
from megatron_fsdp_v2_patching import Patch
from tests.pages import rows_of, section

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


def state_of(module: Any) -> dict[str, Any]:
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


def test_optional_patch_is_left_out_if_its_module_cannot_be_imported(framework: Any) -> None:
    framework("1.3", "def shard(module): return module")
    module = importlib.import_module(NAME)
    absent = Patch(f"{NAME}.absent:shard", "a test", wrap=f"{__name__}:fails", optional=True)
    adapter = Adapter(NAME, {"1.3": (absent, TARGET)})
    adapter.install("optim")
    assert module.shard("model") == ("model", "optim")
    adapter.uninstall()


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


# -- megatron-fsdp and automodel ------------------------------------------------------------------


def test_every_argument_of_megatron_fsdp_has_a_row() -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "distributed/fsdp/src/megatron_fsdp/fully_shard.py"
    tree = ast.parse(source.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    theirs = {arg.arg for arg in functions["fully_shard"].args.args}
    rows = {
        name: cells[1]
        for cells in rows_of(section("docs/hugging_face.md", "megatron-fsdp"))
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert rows.keys() == theirs
    honored = inspect.signature(megatron_fsdp.fully_shard).parameters.keys() - {"others"}
    assert {name for name in rows if rows[name] == "supported"} == honored
    assert {name for name in rows if rows[name] == "no-op"} == set(megatron_fsdp.NO_OP)
    assert {name for name in rows if rows[name] == "rejected"} == set(megatron_fsdp.REJECTED)


AUTOMODEL = "nemo_automodel.components.distributed"


@pytest.fixture
def automodel_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return automodel's modules with the names that are patched."""
    folder = tmp_path / AUTOMODEL.replace(".", "/")
    folder.mkdir(parents=True)
    (folder / "parallelizer.py").write_text(
        "def fully_shard(): ...\n"
        "def fully_shard_model(): ...\n"
        "megatron_fsdp_fully_shard = fully_shard\n"
        "megatron_fsdp_fully_shard_model = fully_shard_model\n"
        "class MegatronFSDPMixedPrecisionPolicy: ...\n"
    )
    (folder / "config.py").write_text(
        "class MegatronFSDPConfig:\n    def __init__(self): self.zero_dp_strategy = 3\n"
    )
    (folder / "tp_replicas.py").write_text(
        "def _iter_unique_parameters_by_name(model_parts): yield from model_parts\n"
    )
    shared = tmp_path / "nemo_automodel/shared"
    shared.mkdir()
    (shared / "tied_weights.py").write_text(
        "tied = []\ndef ensure_tied_lm_head(model): tied.append(model)\n"
    )
    metadata = tmp_path / "nemo_automodel-0.7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: nemo-automodel\nVersion: 0.7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("parallelizer", "config", "tp_replicas")
    yield [importlib.import_module(f"{AUTOMODEL}.{name}") for name in names]
    automodel.uninstall()
    for name in [name for name in sys.modules if name.startswith("nemo_automodel")]:
        del sys.modules[name]


@pytest.mark.parametrize("strategy", [None, "optim"])
def test_automodel_gets_the_names_of_megatron_fsdp(
    automodel_modules: Any, monkeypatch: pytest.MonkeyPatch, strategy: str | None
) -> None:
    parallelizer, config, replicas = automodel_modules
    before = [*map(state_of, automodel_modules), state_of(config.MegatronFSDPConfig)]
    given: list[Any] = []
    sharded = SimpleNamespace(module=SimpleNamespace())
    results = {"fully_shard": (sharded, "optimizer"), "fully_shard_model": sharded}
    for name, result in results.items():
        function = create_autospec(getattr(megatron_fsdp, name), return_value=result)
        monkeypatch.setattr(megatron_fsdp, name, function)
        given.append(function)
    automodel.install(strategy, report_nan_in_param_grad=True)
    assert parallelizer.MegatronFSDPMixedPrecisionPolicy is megatron_fsdp.MixedPrecisionPolicy
    wanted = ((sharded.module, "optimizer"), sharded.module)
    for name, result in zip(results, wanted, strict=True):
        function = getattr(parallelizer, f"megatron_fsdp_{name}")
        assert {"mixed_precision_policy", "report_nan_in_param_grad"} <= set(
            inspect.signature(function).parameters
        )
        assert function("model", "optimizer or mesh", zero_dp_strategy=3) == result
    options = {"zero_dp_strategy": strategy or 3, "report_nan_in_param_grad": True}
    for function in given:
        function.assert_called_once_with("model", "optimizer or mesh", **options)
    sharded.module._replace_param_with_distributed_if_needed()
    assert importlib.import_module("nemo_automodel.shared.tied_weights").tied == ["model"] * 2
    assert not config.MegatronFSDPConfig().defer_fsdp_grad_sync
    assert [*replicas._iter_unique_parameters_by_name([("weight", "mean")])] == [("weight", "mean")]
    automodel.uninstall()
    assert [*map(state_of, automodel_modules), state_of(config.MegatronFSDPConfig)] == before


# -- torchtitan -----------------------------------------------------------------------------------


class BlockShard(NamedTuple):
    """The fields of torchtitan's class."""

    dim: int
    block_size: int


@pytest.mark.parametrize(
    ("shape", "shards", "message"),
    [
        ((8, 3), (), "parameter weight has no layout in compute_sharding_by_fqn"),
        ((8, 3), (BlockShard(0, 4), BlockShard(0, 2)), "in one size along all axes"),
        ((8, 3), (BlockShard(1, 3),), "BlockShard splits the rows of a matrix"),
        ((8, 4, 3), (BlockShard(0, 4),), "parameter weight of shape (8, 4, 3) has the layouts"),
    ],
)
def test_layout_of_dist_muon_without_a_meaning_is_rejected(
    shape: tuple[int, ...], shards: tuple[BlockShard, ...], message: str
) -> None:
    layout = SimpleNamespace(shardings_by_mesh_axis=dict(enumerate(shards)))
    group = {"params": [torch.ones(shape)], "param_names": ["weight"]}
    with pytest.raises(ValueError, match=re.escape(message)):
        torchtitan.builds_muon(print, {})(
            [group],
            compute_sharding_by_fqn={"weight": layout} if shards else {},
            bucket_configs=(),
        )


def test_checks_of_types_are_rejected() -> None:
    make = torchtitan.rejects_typechecking(lambda parallel_dims: parallel_dims, {})
    assert make(parallel_dims="dims") == "dims"
    with pytest.raises(ValueError, match="check the same job with FSDP2"):
        make(parallel_dims="dims", spmd_typechecking=True)


SCALES = {
    "current": lambda values: values.abs().max() / 448,
    "delayed": lambda values: torch.ones(()),
    "blocks": lambda values: values.abs().amax(1, keepdim=True) / 448,
}
"""Inverse scales of 8-bit weights, by the kind of scaling."""


@pytest.mark.parametrize("kind", SCALES)
def test_quantized_weights_start_from_initial_values_unless_loaded(kind: str) -> None:
    def is_kept(stored: torch.Tensor, initial: torch.Tensor) -> bool:
        scale = SCALES[kind](stored)
        rounded = (stored / scale).to(torch.float8_e4m3fn).float() * scale
        module, cleared = torch.nn.Module(), []
        module.weight = param = torch.nn.Parameter(torch.empty_like(initial))
        param.dequantize = lambda: rounded
        param.get_high_precision_init_val = lambda: initial
        param.clear_high_precision_init_val = lambda: cleared.append(param)
        if kind != "blocks":
            param._scale_inv = scale.reshape(1)
        bridge._forget_initial_values(module)
        return not cleared

    torch.manual_seed(0)
    initial = 0.02 * torch.randn(64, 128)
    # After a few steps from the same initial values, weights differ less than their sizes.
    trained = initial + 3e-3 * torch.randn(64, 128)
    assert is_kept(initial, initial)
    assert not is_kept(trained, initial)
