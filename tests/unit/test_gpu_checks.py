"""The checks that need GPUs are rehearsed on a CPU."""

from __future__ import annotations

import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model import Model
from tests.gpu import conftest, machine
from tests.gpu.test_overlap import overlap_fraction
from tests.gpu.test_speed import MODELS, flops_of, num_params
from tests.processes import ROOT, ran

FILES = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def _rehearsed(*words: str | Path) -> str:
    """Run checks on a CPU, assert that none fails, and return the output of pytest."""
    command = ("-m", "pytest", "-v", "--device", "cpu", "--ranks", "2", "--small")
    done = ran(sys.executable, *command, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.functional
def test_cpu_run_describes_the_machine_and_skips_gpu_only_checks() -> None:
    name = "sharded_parameters_matches_muon or sanitizer_reports_a_race"
    written = _rehearsed("tests/gpu/test_training.py", "tests/gpu/test_sanitizer.py", "-k", name)
    assert "1 passed, 1 skipped" in written
    assert "needs a GPU" in written
    assert f"torch: {torch.__version__.partition('+')[0]}" in written
    assert re.search(r"^commit: \w{40}", written, re.MULTILINE)


@pytest.mark.functional
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_check_is_rehearsed_on_a_cpu(file: Path) -> None:
    # A check that a CPU cannot verify runs and is then skipped with this reason.
    assert re.search(r"\d+ passed|; rehearsed on a CPU", _rehearsed(file, "-rs"))


def test_checks_run_in_the_order_in_which_one_must_know_their_results() -> None:
    names = [
        "test_quantized.py::test_gathered_bytes[mxfp8]",
        "test_memory.py::test_memory[optim]",
        "test_training.py::test_every_pattern_trains_like_an_unsharded_loop[HSDP-fp32]",
        "test_training.py::test_every_pattern_trains_like_an_unsharded_loop[one axis-fp32]",
        "test_sanitizer.py::test_sanitizer_reports_nothing_in_two_steps[optim-2x2-optim]",
        "test_sanitizer.py::test_sanitizer_reports_nothing_in_two_steps[optim-2-no_shard]",
        "test_speed.py::test_model[8B-FSDP2]",
        "test_speed.py::test_model[1B-FSDP2]",
        "test_features.py::test_side_stream[hooks]",
        "test_host.py::test_host[optim]",
        "test_training.py::test_every_pattern_trains_like_an_unsharded_loop[one rank-fp32]",
    ]
    items: list[Any] = [
        types.SimpleNamespace(
            path=FILES[0], nodeid=f"tests/gpu/{name}", add_marker=lambda marker: None
        )
        for name in names
    ]
    conftest.pytest_collection_modifyitems(items)
    assert [names.index(item.nodeid.removeprefix("tests/gpu/")) for item in items] == [
        *(10, 3, 9, 5, 8, 7, 0),
        *(1, 2, 4, 6),
    ]


def test_no_check_starts_after_the_given_minutes() -> None:
    def item(minutes: float | None) -> Any:
        config = types.SimpleNamespace(getoption=lambda name: minutes)
        return types.SimpleNamespace(path=FILES[0], config=config)

    conftest.pytest_runtest_setup(item(None))
    conftest.pytest_runtest_setup(item(1e6))
    with pytest.raises(pytest.skip.Exception, match="not started within --minutes 0"):
        conftest.pytest_runtest_setup(item(0.0))


def test_a_command_ends_with_the_checks(tmp_path: Path) -> None:
    until = machine.Machine("cpu", 1, ends_at=time.monotonic() + 0.5)
    assert until.within(0.1) == 0.1
    began = time.monotonic()
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError, match="not done after 1 s"):
        machine.run_command(until, words, tmp_path / "log", environment={})
    assert time.monotonic() - began < 30
    alone = machine.Machine("cpu", 1)
    assert alone.within() == machine.LIMIT_S
    done = machine.run_command(alone, ["echo", "done"], tmp_path / "log", environment={})
    assert (done.code, done.output) == (0, "done\n")


@pytest.mark.parametrize(
    ("driver", "can_run"), [("580.65.06", True), ("470.1", False), ("", False)]
)
def test_old_driver_and_missing_package_are_reported(
    monkeypatch: pytest.MonkeyPatch, driver: str, can_run: bool
) -> None:
    monkeypatch.setattr(machine, "_output", lambda *words: driver)
    monkeypatch.setattr(machine, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said, can = machine.requirements()
    assert can is can_run
    assert any("driver 580 or newer" in sentence for sentence in said) is not can_run
    assert f"transformer-engine[pytorch]=={machine.TRANSFORMER_ENGINE}" in said[-1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu_exits_with_code_2_and_the_reason() -> None:
    done = ran(sys.executable, "-m", "pytest", "tests/gpu/test_host.py", "--device", "cuda")
    assert done.returncode == 2
    assert re.search(r"_pytest.outcomes.Exit: (.*NVIDIA's driver|there is no GPU)", done.stdout)


def test_overlap_fraction_is_computed_from_kernel_times() -> None:
    kernels = [
        ("ncclDevKernel_AllGather", (0.0, 10.0)),
        ("gemm", (4.0, 8.0)),
        ("gemm", (6.0, 9.0)),
        ("ncclDevKernel_ReduceScatter", (20.0, 30.0)),
        ("Memset", (29.0, 40.0)),
    ]
    assert overlap_fraction(kernels) == pytest.approx((5 + 1) / 20)
    assert overlap_fraction(kernels[1:3]) is None


@pytest.mark.parametrize(("name", "number"), [("1B", 1e9), ("8B", 8e9)])
def test_parameters_and_flops_are_those_of_the_model(name: str, number: float) -> None:
    setting = MODELS[name]
    with torch.device("meta"):
        counted = sum(param.numel() for param in Model(setting.shape).parameters())
    assert num_params(setting.shape) == counted == pytest.approx(number, rel=0.06)
    # Six per parameter and token, without the embedding; attention adds up to a quarter.
    tokens = setting.shape.batch * setting.shape.length
    assert 0.9 < flops_of(setting) / (6 * counted * tokens) < 1.25


def test_page_has_a_row_for_every_file_of_checks() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [file.name for file in FILES if f"| `{file.name}` |" not in page] == []
