"""Megatron trainings on GPUs by the user's commands: rows of the functional matrix."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.pretrain_text.launch import training_command
from functional_tests.matrix import RESUMED_TO, SAVED, Row
from functional_tests.rows import ROWS
from megatron_cpu_rehearsal.te.load import why_not_installed
from tests.gpu.machine import Machine, has_transformer_engine, run_command
from tests.mcore.command_line import PRINTED
from tests.mcore.flags import fsdp
from tests.mcore.session import distance

# On a GPU the alignment of a tensor determines the kernel and its order of summation, and
# Transformer Engine multiplies fp32 matrices in TF32.
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-4}
LOW_PRECISION = 1e-2
AS_CLOSE = 2.0
_FP8 = [
    *("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    *("--hidden-size", "128", "--ffn-hidden-size", "256"),
]
_GATHERED_IN_FP8 = ["--fp8-param-gather", "--megatron-fsdp-main-params-dtype", "fp32"]
_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size")


def row(name: str) -> Row:
    """Return a row of the functional matrix by its name."""
    (found,) = (row for row in ROWS if row.name == name)
    return found


def _device_flags(machine: Machine, *, in_fp8: bool = False) -> list[str]:
    # Rows of the matrix select local layers; the last value of a flag counts.
    if not machine.on_cuda:
        # Local layers take less time than Transformer Engine's over reference kernels.
        kind = "transformer_engine" if in_fp8 else "local"
        return ["--cpu-rehearsal", "--transformer-impl", kind]
    if has_transformer_engine():
        return ["--transformer-impl", "transformer_engine"]
    return [
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
        *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion"),
    ]


def _environment(machine: Machine, flags: Sequence[str]) -> dict[str, str | None]:
    """Return the environment: Megatron needs one hardware queue for TP or CP, but not for FSDP."""
    if not machine.on_cuda:
        return {"CUDA_VISIBLE_DEVICES": ""}
    sizes = [flags[flags.index(name) + 1] for name in _SIZES if name in flags]
    wants_one = any(size != "1" for size in sizes) and "--use-megatron-fsdp" not in flags
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if wants_one else None,
        # The comparison needs attention with a fixed order of summation.
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


def losses(
    machine: Machine, folder: Path, ranks: int, flags: Sequence[str], name: str
) -> dict[int, float]:
    """Return the losses that `pretrain_gpt` prints, by iteration; its log is `<name>.log`."""
    own = _device_flags(machine, in_fp8="--fp8-format" in flags)
    words, environment = training_command(ranks, [*flags, *own]), _environment(machine, flags)
    done = run_command(machine, words, folder / f"{name}.log", environment=environment)
    assert done.code == 0 and done.losses, done.output[-3000:]
    return done.losses


def _difference(mine: dict[int, float], theirs: dict[int, float]) -> float:
    assert mine.keys() == theirs.keys()
    return distance(list(mine.values()), list(theirs.values()))


LIKE_DDP = [
    # Name of a row, number of ranks (0: those of the row), number of strategies to train.
    *(("dense", 1, 4), ("dense", 2, 4), ("dense, bf16", 2, 4)),
    *((name, 0, 1) for name in ("TP2", "PP2, tied", "EP2", "Muon")),
    *((name, 0, 1) for name in ("trace pool, evaluation in between", "TP2 x PP2 x DP2")),
    *((name, 0, 1) for name in ("TP2 x DP2, sequence parallel", "EP2 x DP2, all-to-all")),
]


@pytest.mark.parametrize(("name", "ranks", "strategies"), LIKE_DDP)
def test_row_of_the_matrix_matches_megatrons_ddp(
    machine: Machine, tmp_path: Path, name: str, ranks: int, strategies: int
) -> None:
    found = row(name)
    ranks = ranks or found.world_size
    machine.require(ranks)
    if machine.on_cuda and "--sequence-parallel" in found.flags and not has_transformer_engine():
        pytest.skip("needs Transformer Engine: local layers have no norm for sequence parallelism")

    def trained(flags: Sequence[str], name: str) -> dict[int, float]:
        return losses(machine, tmp_path, ranks, flags, name)

    chosen = found.strategies[:strategies]
    reference = trained(found.reference(chosen[0]).flags, "ddp")
    is_low = found.is_bitwise and machine.on_cuda
    bound = LOW_PRECISION if is_low else TOLERANCE[machine.device] + PRINTED
    if found.is_bitwise:
        # Norms are not exact here, so a difference as large as that between DDP and Megatron's own
        # distributed optimizer is allowed.
        flags = [*found.reference(chosen[0]).flags, "--use-distributed-optimizer"]
        beside = trained(flags, "distributed_optimizer")
        bound = max(bound, AS_CLOSE * _difference(beside, reference))
    for strategy in chosen:
        mine = trained(found.sharded(strategy).flags, strategy)
        assert _difference(mine, reference) <= bound, strategy


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["save", "async save"])
def test_run_resumes_from_a_checkpoint_of_another_strategy(
    machine: Machine, tmp_path: Path, flags: list[str]
) -> None:
    machine.require(2)
    common = [*row("dense").reference("").flags, *flags, "--train-iters", str(RESUMED_TO)]
    folder = str(tmp_path / "checkpoints")
    saving = ["--save", folder, "--save-interval", str(SAVED)]
    whole = [*common, *fsdp("optim_grads_params", *saving)]
    expected = losses(machine, tmp_path, 2, whole, "first_run")
    loading = ["--load", folder, "--ckpt-step", str(SAVED)]
    resumed = losses(machine, tmp_path, 2, [*common, *fsdp("optim", *loading)], "resumed_run")
    # Megatron prints a mean over two iterations in the second line of a run.
    compared = [number for number in resumed if number > SAVED + 2]
    worst = distance([resumed[n] for n in compared], [expected[n] for n in compared])
    assert compared and worst <= TOLERANCE[machine.device] + PRINTED


def test_weights_gathered_in_fp8_match_ddp(machine: Machine, tmp_path: Path) -> None:
    machine.require(2)
    if not has_transformer_engine() if machine.on_cuda else why_not_installed():
        pytest.skip("needs Transformer Engine")
    flags = [*row("dense, bf16").reference("").flags, *_FP8]
    ours = [*flags, *fsdp("optim_grads_params"), *_GATHERED_IN_FP8]
    reference = losses(machine, tmp_path, 2, flags, "ddp")
    assert _difference(losses(machine, tmp_path, 2, ours, "fp8"), reference) < 5e-3


def test_make_pretrain_trains_on_real_text_and_repeats_its_losses(
    machine: Machine, tmp_path: Path
) -> None:
    ranks = max(n for n in (1, 2, 3, 4) if n <= machine.ranks)
    words = ["-m", "examples.pretrain_text", "--ranks", str(ranks), "--iters", "20"]
    words += ["--out", str(tmp_path / "out")]
    done = run_command(
        machine, [sys.executable, *words], tmp_path / "log", environment=_environment(machine, ())
    )
    assert done.code == 0, done.output[-2000:]
    assert re.search(r"resume proof\s+holds", done.output)
