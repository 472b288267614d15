"""The kit for the first GPU tells what passed from what did not, and from what was not tried."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model import Model
from tests.gpu.kit import __main__ as kit
from tests.gpu.kit import machine, overlap, quantized, running, speed, trainings
from tests.gpu.kit.__main__ import main
from tests.gpu.kit.checks import CHECKS
from tests.gpu.kit.running import (
    ROOT,
    Check,
    Outcome,
    Request,
    Result,
    Status,
    command,
    on_ranks,
    python,
    run_checks,
)
from tests.ranks import RankPools

WRONG = "what went wrong"


def _check(name: str, run: Callable[[Request], Outcome], **more: Any) -> Check:
    return Check(name, f"that {name} is reported", run, **more)


def _passes(request: Request) -> Outcome:
    return Outcome.of(True, "as it should be")


def _crash() -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(60)


def _ranks_that(function: Callable[[], None], limit_s: float, request: Request) -> Outcome:
    on_ranks(request, 2, function, limit_s=limit_s)
    return _passes(request)


def _command_of(code: str, request: Request) -> Outcome:
    command(python("-c", code), request.folder / "log", limit_s=2.0).checked()
    return _passes(request)


def _results(checks: list[Check], tmp_path: Path, **more: Any) -> dict[str, Result]:
    request = Request("cpu", 2, tmp_path, **more)
    return {result.check.name: result for result in run_checks(checks, request)}


def test_a_small_sample_runs_on_a_cpu_and_is_reported(tmp_path: Path) -> None:
    only = [
        word
        for name in ("parity, fp32", "parity, HSDP, fp32", "streams")
        for word in ("--only", name)
    ]
    words = ["--device", "cpu", "--ranks", "2", "--small", "--out", str(tmp_path)]
    assert main([*words, *only]) == 0
    record = json.loads((tmp_path / "report.json").read_text())
    statuses = {check["name"]: check["status"] for check in record["checks"]}
    assert statuses == {
        "parity, fp32": "passed",
        "parity, HSDP, fp32": "needs more ranks",
        "streams": "needs a GPU",
    }
    errors = record["checks"][0]["numbers"]["errors"]["plain"]
    assert len(errors) == 4 and all(0 <= error < 1e-6 for error in errors.values())
    assert record["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert {"commit", "NCCL", "GPUs", "transformer_engine", "environment"} <= set(record["machine"])
    page = (tmp_path / "report.md").read_text()
    assert "| parity, fp32 | passed |" in page
    assert "| streams | needs a GPU |" in page
    for picture in ("checks.png", "parity.png"):
        assert f"({picture})" in page
        assert (tmp_path / picture).stat().st_size > 1000


REHEARSED = (
    "trace pool",
    "prefetch",
    "asynchronous reduction",
    "Muon",
    "async save",
    "memory",
    "pauses",
    "whole-step capture",
    "host",
    "overlap",
    "gather bandwidth",
    "speed, 1B",
)


class _Shared:
    """A pool that outlives a check: starting processes takes longer than what they do."""

    def __init__(self, pools: RankPools, ranks: int) -> None:
        self._pool = pools(ranks)
        self.run = self._pool.run

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", REHEARSED)
def test_a_check_runs_on_a_cpu_as_far_as_it_goes(
    pools: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(running, "RankPool", lambda ranks, device: _Shared(pools, ranks))
    (check,) = (check for check in CHECKS if check.name == name)
    (result,) = _results([check], tmp_path, is_small=True).values()
    wanted = Status.NEEDS_GPU if check.only_cuda else Status.PASSED
    assert result.outcome.status is wanted, result.outcome.text


@pytest.mark.functional
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_whole_kit_is_rehearsed_on_a_cpu(tmp_path: Path, check: Check) -> None:
    (result,) = _results([check], tmp_path, is_small=True).values()
    allowed = {Status.NEEDS_GPU} if check.only_cuda else {Status.PASSED}
    allowed |= {Status.NEEDS_RANKS, Status.NEEDS_LAYERS}
    assert result.outcome.status in allowed, result.outcome.text


def test_every_training_of_megatron_finds_its_row_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = _printed({step: 5.0 - step / 10 for step in range(1, 11)})
    done = trainings.Done(0, f"{printed}resume proof passed")
    layers = set()

    def command(words: list[str], log: Path, **_: Any) -> trainings.Done:
        kinds = [kind for flag, kind in itertools.pairwise(words) if flag == "--transformer-impl"]
        layers.add((kinds or [""])[-1])
        return done

    monkeypatch.setattr(trainings, "command", command)
    monkeypatch.setattr(trainings, "has_transformer_engine", lambda: True)
    named = [check for check in CHECKS if check.name.startswith("Megatron, ")]
    for device in ("cpu", "cuda"):
        for check in named:
            outcome = check.run(Request(device, 8, tmp_path))
            assert outcome.status is Status.PASSED, (check.name, outcome.text)
        # Transformer Engine's on a GPU, and for FP8; `make pretrain` leaves them to Megatron.
        if device == "cuda":
            assert layers == {"transformer_engine", ""}
        layers.clear()


def test_the_share_of_communication_that_is_hidden_comes_from_times_of_kernels() -> None:
    kernels = [
        ("ncclDevKernel_AllGather", (0.0, 10.0)),
        ("gemm", (4.0, 8.0)),
        ("gemm", (6.0, 9.0)),
        ("ncclDevKernel_ReduceScatter", (20.0, 30.0)),
        ("Memset", (29.0, 40.0)),
    ]
    assert overlap.hidden_share(kernels) == pytest.approx((5 + 1) / 20)
    assert overlap.hidden_share(kernels[1:3]) is None


def test_a_model_of_a_billion_parameters_has_them() -> None:
    for name, params in {"1B": 1e9, "8B": 8e9}.items():
        setting = speed.MODELS[name]
        with torch.device("meta"):
            model = Model(setting.shape)
        counted = sum(param.numel() for param in model.parameters())
        assert speed.num_params(setting.shape) == counted
        assert counted == pytest.approx(params, rel=0.06)
        # Six for each parameter and token, and less than a quarter more for attention.
        tokens = setting.shape.batch * setting.shape.length
        assert 0.9 < speed.flops_of(setting) / (6 * counted * tokens) < 1.25


@pytest.mark.parametrize(
    ("driver", "can_run"), [("580.65.06", True), ("470.1", False), ("", False)]
)
def test_an_old_driver_and_a_missing_package_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: str,
    can_run: bool,
) -> None:
    monkeypatch.setattr(machine, "_output", lambda *words: driver)
    monkeypatch.setattr(machine, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said, can = machine.requirements()
    assert can is can_run
    assert any("driver 580 or newer" in sentence for sentence in said) is not can_run
    assert f"transformer-engine[pytorch]=={machine.TRANSFORMER_ENGINE}" in said[-1]
    if not can_run:
        assert main(["--device", "cuda"]) == 2
        assert "which needs NVIDIA's driver 580" in capsys.readouterr().out


def test_what_fails_in_any_way_is_reported_as_failed_and_stops_nothing(tmp_path: Path) -> None:
    checks = [
        _check("a wrong number", lambda request: Outcome.of(False, "1 against 2")),
        _check("an exception", lambda request: Outcome.of(bool(1 // 0), "")),
        _check("a crash", functools.partial(_ranks_that, _crash, 30.0)),
        _check("a hang", functools.partial(_ranks_that, _hang, 0.2)),
        _check("a late command", functools.partial(_command_of, "import time; time.sleep(60)")),
        _check(
            "a failed command",
            functools.partial(_command_of, f"exit({WRONG[::-1]!r}[::-1])"),
        ),
        _check("the next one", _passes),
    ]
    assert main(["--device", "cpu", "--out", str(tmp_path)], checks) == 1
    record = json.loads((tmp_path / "report.json").read_text())
    found = {check["name"]: (check["status"], check["text"]) for check in record["checks"]}
    assert found.pop("the next one") == ("passed", "as it should be")
    assert {status for status, _ in found.values()} == {"failed"}
    for name, said in {
        "a wrong number": "1 against 2",
        "an exception": "ZeroDivisionError",
        "a crash": "rank 1: the process died",
        "a hang": "no answer in time",
        "a late command": "not done after 2 s",
        "a failed command": WRONG,
    }.items():
        assert said in found[name][1], name
    page = (tmp_path / "report.md").read_text()
    assert "## Failed: a crash" in page
    assert "| the next one | passed |" in page


def test_what_only_a_gpu_shows_never_passes_on_a_cpu(tmp_path: Path) -> None:
    checks = [
        _check("rehearsed", _passes, only_cuda=True),
        _check("not rehearsed", _passes, only_cuda=True, is_rehearsed=False),
        _check("a bad rehearsal", lambda request: Outcome.of(False, "no"), only_cuda=True),
    ]
    statuses = {name: r.outcome.status for name, r in _results(checks, tmp_path).items()}
    assert statuses == {
        "rehearsed": Status.NEEDS_GPU,
        "not rehearsed": Status.NEEDS_GPU,
        "a bad rehearsal": Status.FAILED,
    }


def test_more_ranks_than_gpus_are_rejected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "num_gpus", lambda: 2)
    monkeypatch.setattr(kit, "requirements", lambda: ([], True))
    with pytest.raises(SystemExit):
        main(["--device", "cuda", "--ranks", "3"])
    assert "3 ranks need as many GPUs, and there are 2" in capsys.readouterr().err


def test_checks_have_names_of_their_own_and_say_what_they_prove() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.proves for check in CHECKS)
    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    documented = {name.strip() for row in rows for name in row.split(";")}
    assert {check.name for check in CHECKS} <= documented


def _printed(losses: dict[int, float]) -> str:
    return "".join(f"iteration {i}/ 10 | lm loss: {loss:.6E} |\n" for i, loss in losses.items())


@pytest.mark.parametrize(
    ("of_ours", "status"), [(4.0, Status.PASSED), (4.1, Status.FAILED), (None, Status.FAILED)]
)
def test_a_training_passes_where_it_prints_the_losses_of_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_ours: float | None, status: Status
) -> None:
    seen = []

    def pretrain(words: Any, log: Path, *, environment: Any) -> trainings.Done:
        seen.append((words, environment))
        is_ours = "--use-fsdp-fully-shard-api" in words
        third = of_ours if is_ours else 4.0
        return trainings.Done(0, _printed({1: 5.0} if third is None else {1: 5.0, 3: third}))

    monkeypatch.setattr(trainings, "command", pretrain)
    check = _check("TP2", lambda request: trainings.beside_ddp(request, "TP2"))
    (result,) = _results([check], tmp_path).values()
    assert result.outcome.status is status, result.outcome.text
    assert all("--cpu-rehearsal" in words for words, _ in seen)
    # On a GPU Megatron's own side of it has to have one hardware queue, and ours must not.
    request = Request("cuda", 2, tmp_path)
    of_ddp, ours = seen[0][0], seen[-1][0]
    trainings.pretrain(request, 2, of_ddp, "ddp")
    trainings.pretrain(request, 2, ours, "ours")
    assert [e["CUDA_DEVICE_MAX_CONNECTIONS"] for _, e in seen[-2:]] == ["1", None]


def test_a_row_that_only_transformer_engine_can_train_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "has_transformer_engine", lambda: False)
    request = Request("cuda", 4, tmp_path)
    outcome = trainings.beside_ddp(request, "TP2 x DP2, sequence parallel")
    assert outcome.status is Status.NEEDS_LAYERS
    without = Request("cuda", 4, tmp_path, has_te=False)
    assert trainings.fp8(without).status is Status.NEEDS_LAYERS
    assert quantized.run(without).status is Status.NEEDS_LAYERS
