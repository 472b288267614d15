"""Trains Megatron several times in one process group: build, train, tear down.

Importing Megatron takes seconds, a short training milliseconds. The functions run on the ranks of a
dedicated pool, whose processes start a CPU rehearsal once and keep it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@dataclass
class Training:
    """Measurements of one rank in a training.

    Attributes:
        losses: Exact loss of every iteration, on the last pipeline stage.
        grad_norms: Gradient norm before clipping.
        params_norms: Norm of the parameters, with `--log-params-norm`.
        num_zeros: Number of zeros in gradients, with `--log-num-zeros-in-grad`.
        learning_rates: Logged learning rate of every iteration.
        loss_scales: Loss scale of every iteration.
        skipped: For every iteration, whether its update was skipped.
        evaluations: Loss of every evaluation, on the last pipeline stage.
        extras: Return value of a probe.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    params_norms: list[float] = field(default_factory=list)
    num_zeros: list[float] = field(default_factory=list)
    learning_rates: list[float | None] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    extras: Any = None


def train(
    flags: Sequence[str],
    probe: Any = None,
    freezes: Sequence[str] = (),
    *,
    exact_norms: bool = False,
) -> Training:
    """Run one training on this rank. Collective over the pool.

    Args:
        flags: Flags of a user. Flags of the rehearsal are added.
        probe: Called with `(model, optimizer)` after the training; its result becomes `extras`.
        freezes: Regular expressions. Parameters with a matching name are frozen when their chunk is
            built; Megatron has no flag for this.
        exact_norms: Whether gradient norms are summed in fp64, where the order does not matter.
    """
    modules = enter_rehearsal(impl_of(flags), flags)
    from megatron_fsdp_v2_mcore.prove import session

    result = Training()
    with session.training(flags, rehearses=True) as (patches, run):
        _watch(patches, modules["training"], result, probe)
        _freeze(patches, modules["gpt"], freezes)
        if exact_norms:
            session.sum_norms_in_fp64(patches)
        with _silent():
            run()
    return result


def _watch(patches: Any, training: Any, result: Training, probe: Any) -> None:
    """Record the values that Megatron's loop logs, and call the probe after it."""
    log, evaluate, loop = training.training_log, training.evaluate, training.train

    def capture(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        loss = loss_dict.get("lm loss")
        if loss is not None:
            result.losses.append(float(loss))
        # (total, learning rate, iteration, loss scale, report, skipped, grad norm, params norm,
        # zeros, ...)
        result.learning_rates.append(args[1])
        result.loss_scales.append(float(args[3]))
        result.skipped.append(bool(args[5]))
        # Without the flag, optimizers report None or 0.
        zeros = args[8] if training.get_args().log_num_zeros_in_grad else None
        logged = (result.grad_norms, result.params_norms, result.num_zeros)
        for kept, value in zip(logged, (*args[6:8], zeros), strict=True):
            if value is not None:
                kept.append(float(value))
        return log(loss_dict, *args, **kwargs)

    def capture_evaluation(*args: Any, **kwargs: Any) -> Any:
        outcome = evaluate(*args, **kwargs)
        losses = outcome[0] or {}
        if "lm loss" in losses:
            result.evaluations.append(float(losses["lm loss"]))
        return outcome

    def train_and_probe(*args: Any, **kwargs: Any) -> Any:
        outcome = loop(*args, **kwargs)
        if probe is not None:
            result.extras = probe(kwargs.get("model", args[1]), kwargs.get("optimizer", args[2]))
        return outcome

    patches.set(training, "training_log", capture)
    patches.set(training, "evaluate", capture_evaluation)
    patches.set(training, "train", train_and_probe)


def _freeze(patches: Any, gpt: Any, patterns: Sequence[str]) -> None:
    """Freeze parameters of chunks when they are built."""
    build = gpt.build_model

    def build_and_freeze(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, param in model.named_parameters():
            if any(re.search(pattern, name) for pattern in patterns):
                param.requires_grad_(False)
        return model

    patches.set(gpt, "build_model", build_and_freeze)


def merge_ranks(results: Sequence[Training]) -> Training:
    """Merge the measurements of all ranks. Only the last pipeline stage has losses."""
    seen = [result for result in results if result.losses or result.evaluations]
    # A run that loads its last iteration neither trains nor evaluates.
    first = (seen or results)[0]
    on_all = ("grad_norms", "params_norms", "num_zeros", "learning_rates", "loss_scales")
    for found, names in ((seen, ("losses", "evaluations")), (results, on_all)):
        for result in found:
            for name in names:
                assert getattr(result, name) == getattr(first, name), f"ranks report other {name}"
    return dataclasses.replace(first, extras=[result.extras for result in results])


def distance(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two curves of equal length; 0 if both are empty."""
    pairs = zip(mine, theirs, strict=True)
    return max((abs(a - b) / abs(b) for a, b in pairs if a != b), default=0.0)


_MODULES: dict[str, Any] = {}


def impl_of(flags: Sequence[str]) -> str:
    """Return the last value of `--transformer-impl` in a command line."""
    named = [value for name, value in pairwise(flags) if name == "--transformer-impl"]
    return named[-1] if named else "local"


def enter_rehearsal(impl: str = "local", flags: Sequence[str] = ()) -> dict[str, Any]:
    """Start a permanent rehearsal on this rank, unless it has one, and install this package.

    Args:
        impl: See `start_permanent_rehearsal`.
        flags: See `start_permanent_rehearsal`.

    Returns:
        The parts of Megatron that `train` uses.
    """
    modules = start_permanent_rehearsal(impl, flags)
    from megatron_fsdp_v2_mcore import install

    # Megatron's torch_dist checkpoints start processes, which a daemon must not do.
    multiprocessing.current_process().daemon = False
    install()
    torch.manual_seed(0)
    return modules


def enter_te() -> Any:
    """Start a rehearsal with Transformer Engine; return `transformer_engine.pytorch`."""
    enter_rehearsal("transformer_engine")
    import transformer_engine.pytorch as te

    return te


def start_permanent_rehearsal(impl: str = "local", flags: Sequence[str] = ()) -> dict[str, Any]:
    """Start a permanent rehearsal in this process and those forked from it.

    Args:
        impl: Value of `--transformer-impl`. Megatron looks for Transformer Engine once per process,
            so that a pool trains with one value only.
        flags: Flags of a training. Some of them determine the rehearsed GPU, of which a process has
            one.

    Returns:
        The parts of Megatron that `train` uses.
    """
    from megatron_cpu_rehearsal.flags import cpu_capability

    recipe = [*flags, "--fp8-recipe", "delayed"]
    recipe = recipe[recipe.index("--fp8-recipe") :][:2]
    if "--fp4-format" in flags:
        recipe += ["--fp4-format", "e2m1"]
    kind = f"{impl} {cpu_capability(recipe)}"
    assert _MODULES.get("kind", kind) == kind, f"this pool is for {_MODULES['kind']}"
    if not _MODULES:
        # A rehearsal starts before Megatron or this package is imported.
        from megatron_fsdp_v2_mcore.prove import session

        session.start(impl, recipe)
        from megatron.training import training

        from megatron_fsdp_v2_mcore.pretrain_gpt import gpt

        _MODULES.update(kind=kind, training=training, gpt=gpt)
    return _MODULES


@contextlib.contextmanager
def _silent() -> Any:
    if os.environ.get("MCORE_TEST_OUTPUT"):
        yield
        return
    with (
        open(os.devnull, "w") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        yield


def failed_saves_reported_to(text: io.StringIO) -> Any:
    """Return a context in which reports of failed saves go to a text."""
    enter_rehearsal()
    from megatron_fsdp_v2_mcore.checkpoint import failed_saves

    return mock.patch.object(failed_saves, "sys", types.SimpleNamespace(stderr=text))


def rank() -> int:
    """Return this rank, for probes."""
    return int(dist.get_rank())
