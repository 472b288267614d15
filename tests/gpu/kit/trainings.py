"""What checks of Megatron do: rows of the functional matrix, as commands of a user."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from examples.pretrain_text.launch import training_command
from functional_tests.matrix import ROWS, SAVED, Row
from functional_tests.trainings import largest
from tests.gpu.kit.running import CommandFailure, Done, Outcome, Request, Status, command, python
from tests.mcore.command_line import PRINTED, Run
from tests.mcore.session import fsdp

# One for each step of a chain of sums in another order: on a GPU kernels are chosen by alignment,
# and Transformer Engine multiplies fp32 matrices in TF32.
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-4}
LOW_PRECISION = 1e-2
AS_CLOSE = 2.0
_FP8 = [
    "--fp8-format",
    "hybrid",
    "--fp8-recipe",
    "tensorwise",
    "--hidden-size",
    "128",
    "--ffn-hidden-size",
    "256",
]
_GATHERED_IN_FP8 = ["--fp8-param-gather", "--megatron-fsdp-main-params-dtype", "fp32"]
_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size")


def has_transformer_engine() -> bool:
    """Whether Megatron's default layers are there."""
    return importlib.util.find_spec("transformer_engine") is not None


def layers() -> str:
    """Whose layers a training on a GPU is made of here."""
    if has_transformer_engine():
        return "Transformer Engine's layers"
    return "Megatron's local layers: Transformer Engine is not installed"


def row(name: str) -> Row:
    """A row of the functional matrix."""
    (found,) = (row for row in ROWS if row.name == name)
    return found


def _device_flags(request: Request, *, in_fp8: bool = False) -> list[str]:
    # Rows of the matrix name local layers; the last of two flags counts.
    if not request.on_cuda:
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


def _environment(request: Request, flags: Sequence[str]) -> dict[str, str | None]:
    """Megatron insists on one hardware queue with TP or CP, and rejects it with its FSDP."""
    if not request.on_cuda:
        return {"CUDA_VISIBLE_DEVICES": ""}
    sizes = [flags[flags.index(name) + 1] for name in _SIZES if name in flags]
    wants_one = any(size != "1" for size in sizes) and "--use-megatron-fsdp" not in flags
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if wants_one else None,
        # Attention that adds in another order every time could be compared with nothing.
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


def pretrain(request: Request, ranks: int, flags: Sequence[str], name: str) -> Done:
    """Run `pretrain_gpt` under torchrun; its log is `<name>.log` in the check's folder."""
    own = _device_flags(request, in_fp8="--fp8-format" in flags)
    words = training_command(ranks, [*flags, *own])
    log = request.folder / f"{name}.log"
    return command(words, log, environment=_environment(request, flags))


def losses(request: Request, ranks: int, flags: Sequence[str], name: str) -> dict[int, float]:
    """Losses that a training prints, by iteration.

    Raises:
        CommandFailure: It failed, or printed none.
    """
    done = pretrain(request, ranks, flags, name).checked()
    found = Run(done.code, done.output).losses
    if not found:
        raise CommandFailure(f"{name} printed no loss; its last lines:\n{done.output[-2000:]}")
    return found


def _difference(mine: dict[int, float], theirs: dict[int, float]) -> float:
    if mine.keys() != theirs.keys():
        raise CommandFailure(f"iterations {list(mine)} against {list(theirs)}")
    return largest(list(mine.values()), list(theirs.values()))


def beside_ddp(
    request: Request,
    name: str,
    ranks: int | None = None,
    *,
    strategies: int = 1,
    changes: Sequence[str] = (),
) -> Outcome:
    """Whether a row of the matrix trains as Megatron's own DDP does.

    Where that differs from Megatron's own distributed optimizer, such a difference is allowed.

    Args:
        request: What was asked for.
        name: The row's.
        ranks: Number of ranks; the row's own when None.
        strategies: How many of the row's strategies to train with.
        changes: Flags to add on all sides.
    """
    found = row(name)
    ranks = ranks or found.world_size
    needs_layers = "--sequence-parallel" in found.flags.split()
    if request.on_cuda and needs_layers and not has_transformer_engine():
        return Outcome(
            Status.NEEDS_LAYERS, "Megatron's local layers have no norm for sequence parallelism"
        )
    reference = losses(request, ranks, [*found.reference.flags, *changes], "ddp")
    plain = found.yardsticks[0].flags
    beside = losses(request, ranks, [*plain, *changes], "distributed_optimizer")
    spread = _difference(beside, reference)
    low = found.is_low_precision or "--bf16" in changes
    least = LOW_PRECISION if low and request.on_cuda else TOLERANCE[request.device] + PRINTED
    bound = max(least, AS_CLOSE * spread)
    differences = {
        strategy: _difference(
            losses(request, ranks, [*found.sharded(strategy).flags, *changes], strategy), reference
        )
        for strategy in found.strategies[:strategies]
    }
    worst = max(differences.values())
    whose = layers() if request.on_cuda else "rehearsed"
    return Outcome.of(
        worst <= bound,
        f"{ranks} ranks, {whose}: losses differ from DDP's by {worst:.1e} at most, the distributed "
        f"optimizer's by {spread:.1e}; allowed are {bound:.1e}",
        differences=differences,
        spread=spread,
        bound=bound,
    )


def resumes(request: Request, *flags: str) -> Outcome:
    """Whether a run goes on from a checkpoint with another strategy as if it had not stopped."""
    common = [*row("dense").reference.flags, *flags]
    folder = str(request.folder / "checkpoints")
    saving = ["--save", folder, "--save-interval", str(SAVED)]
    whole = losses(request, 2, [*common, *fsdp("optim_grads_params", *saving)], "first_run")
    loading = ["--load", folder, "--ckpt-step", str(SAVED)]
    resumed = losses(request, 2, [*common, *fsdp("optim", *loading)], "resumed_run")
    # Megatron prints a mean over two iterations in the second line of a run.
    compared = [number for number in resumed if number > SAVED + 2]
    worst = largest([resumed[n] for n in compared], [whole[n] for n in compared])
    bound = TOLERANCE[request.device] + PRINTED
    return Outcome.of(
        bool(compared) and worst <= bound,
        f"losses {compared} differ by {worst:.1e} at most; allowed are {bound:.1e}",
        difference=worst,
    )


def fp8(request: Request) -> Outcome:
    """Whether weights gathered in FP8 train as under DDP, which quantizes whole ones."""
    if not request.has_te:
        return Outcome(Status.NEEDS_LAYERS, "FP8 is part of Transformer Engine")
    flags = [*row("dense, bf16").reference.flags, *_FP8]
    ours = [*fsdp("optim_grads_params"), *_GATHERED_IN_FP8]
    reference = losses(request, 2, flags, "ddp")
    worst = _difference(losses(request, 2, [*flags, *ours], "fp8"), reference)
    return Outcome.of(worst < 5e-3, f"losses differ from DDP's by {worst:.1e}")


def real_text(request: Request) -> Outcome:
    """`make pretrain`: trains on real text, saves, resumes, compares."""
    ranks = max(n for n in (1, 2, 3, 4) if n <= request.ranks)
    environment: dict[str, Any] = {} if request.on_cuda else {"CUDA_VISIBLE_DEVICES": ""}
    if request.on_cuda:
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    words = [
        *("-m", "examples.pretrain_text", "--ranks", str(ranks)),
        *("--iters", "20", "--out", str(request.folder / "out")),
    ]
    done = command(python(*words), request.folder / "pretrain.log", environment=environment)
    proof = re.findall(r"resume proof\s+(.*)", done.output)
    return Outcome.of(done.code == 0, proof[-1] if proof else done.output[-2000:])
