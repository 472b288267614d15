"""The training loop: steps, evaluations, samples of text, checkpoints, and an export."""

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from tqdm import tqdm

from examples.train_hf.setup import (
    COMPUTE_DTYPES,
    Text,
    build_model,
    build_optimizer,
    load_text,
    num_positions,
    parallelize,
    say,
)
from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import CheckpointError

matplotlib.use("Agg")
from matplotlib import pyplot

PROMPT = "def "
SAMPLE_TOKENS = 48


def train(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains a model on all ranks of the default process group. Collective.

    Returns:
        The lines of `log.jsonl`, one for every step; the same on every rank.

    Raises:
        ValueError: The settings do not fit together, or name files that cannot be used.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    _check(settings, num_ranks)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    text = load_text(settings)
    model = build_model(settings, len(text.tokenizer))
    model.config.architectures = [type(model).__name__]
    trained = parallelize(model, settings, device)
    optimizer = build_optimizer(model, settings)
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = GradScaler(device.type, enabled=settings.dtype == "fp16")
    start, records = 0, list[dict[str, Any]]()
    if settings.resume is not None:
        start, records = _resume(settings, model, optimizer, scaler)
    bar = tqdm(range(start, settings.steps), initial=start, total=settings.steps, disable=rank > 0)
    saved = settings.out
    with _log(settings.out, records) as log:
        for step in bar:
            factor = _rate(step, settings.steps)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            # For dropout: other masks on every rank and in every step, the same after a resume.
            torch.manual_seed(settings.seed + 1 + step * num_ranks + rank)
            batch = text.batch(step, settings.batch_size)[rank::num_ranks].to(device)
            record = {"step": step + 1, **_step(trained, optimizer, scaler, batch, settings)}
            if scaler.is_enabled():
                before = records[-1]["skipped_steps"] if records else 0
                record["skipped_steps"] = before + (record["grad_norm"] is None)
            records.append(record)
            bar.set_postfix(loss=f"{record['loss']:.4f}")
            is_last = step + 1 == settings.steps
            if is_last or (step + 1) % settings.eval_every == 0:
                held_out = text.held_out[rank::num_ranks].to(device)
                record["eval_loss"] = _evaluate(trained, held_out, settings)
                record["sample"] = _sample(model, text, settings)
                say(f"step {step + 1}: eval_loss {record['eval_loss']:.4f}")
                say(f"step {step + 1}: sample {record['sample']!r}")
            log(record)
            if is_last or (settings.save_every and (step + 1) % settings.save_every == 0):
                saved = settings.out / "checkpoints" / f"step_{step + 1:06d}"
                extra = {"step": step + 1, "records": records, "scaler": scaler.state_dict()}
                # On every rank: each one writes the rows that it has.
                checkpoint.save(saved, model, optimizer, extra=extra)
                if rank == 0:
                    _draw(settings, records)
    if settings.export is not None:
        _export(saved, settings.export, model, text)
        say(f"exported: {settings.export}")
    say(f"checkpoint: {saved}")
    return records


def _resume(
    settings: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
) -> tuple[int, list[dict[str, Any]]]:
    """Loads a checkpoint; returns the number of its steps, and their records.

    Raises:
        ValueError: It cannot be loaded, or is of the last step.
    """
    try:
        extra = checkpoint.load(settings.resume, model, optimizer)
    except CheckpointError as error:
        raise ValueError(f"--resume {settings.resume}: {error}") from error
    if extra["step"] >= settings.steps:
        raise ValueError(
            f"--resume {settings.resume} is of step {extra['step']}: give more --steps"
        )
    if scaler.is_enabled() and extra.get("scaler"):
        scaler.load_state_dict(extra["scaler"])
    for record in extra["records"] if scaler.is_enabled() else ():
        record.setdefault("skipped_steps", 0)
    return extra["step"], extra["records"]


@contextlib.contextmanager
def _log(
    out: Path, records: Sequence[dict[str, Any]]
) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Opens `log.jsonl` on the first rank, with the records of the steps before a resume.

    Yields:
        A function to call with the record of every step, which is in the file when it returns.
    """
    if dist.get_rank() > 0:
        yield lambda record: None
        return
    with (out / "log.jsonl").open("w") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        for record in records:
            write(record)
        yield write


def _check(settings: argparse.Namespace, num_ranks: int) -> None:
    """Checks the settings, and sets the micro-batch size if none is given."""
    for name in ("steps", "batch_size", "seq_length", "eval_every", "save_every"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if settings.seq_length < 2:
        raise ValueError("--seq-length must be at least 2: a token predicts the next one")
    if settings.lr is not None and not 0 < settings.lr < math.inf:
        raise ValueError(f"--lr {settings.lr} must be a positive number")
    if settings.micro_batch_size is None:
        settings.micro_batch_size = max(1, settings.batch_size // num_ranks)
    if settings.micro_batch_size < 1 or settings.batch_size % (
        num_ranks * settings.micro_batch_size
    ):
        raise ValueError(
            f"--batch-size {settings.batch_size} must be a multiple of the {num_ranks} ranks times "
            f"--micro-batch-size {settings.micro_batch_size}"
        )
    for name in ("mesh", "sharding_strategy"):
        if getattr(settings, name) is not None and settings.parallel_strategy == "ddp":
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for --parallel-strategy fsdp; leave it out with ddp")
    backends = torch.compiler.list_backends(exclude_tags=())
    if settings.compile is not None and settings.compile not in backends:
        raise ValueError(f"--compile {settings.compile} is none of {', '.join(backends)}")
    if settings.export is not None and settings.export.exists():
        raise ValueError(f"--export {settings.export} exists already; name another folder")
    # Found out at the first checkpoint, this would cost the steps before it.
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {settings.out} cannot be a folder: {error.strerror}") from error


def _step(
    trained: Any,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    rows: torch.Tensor,
    settings: argparse.Namespace,
) -> dict[str, Any]:
    """Makes one step on this rank's rows.

    Returns:
        The loss of all ranks and the gradient norm; in fp16 also the loss scale. The norm is None
        if gradients overflowed: the step is skipped on all ranks, and the next scale is smaller.
    """
    trained.train()
    optimizer.zero_grad()
    parts = rows.split(settings.micro_batch_size)
    losses = []
    for part in parts:
        # Only the last backward reduces gradients over ranks.
        with contextlib.nullcontext() if part is parts[-1] else trained.no_sync():
            loss = _loss(trained, part, settings) / len(parts)
            scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    norm = float(nn.utils.clip_grad_norm_(trained.parameters(), 1.0))
    scaler.step(optimizer)
    found = {"loss": _mean(torch.stack(losses).sum()), "grad_norm": norm}
    if not scaler.is_enabled():
        return found
    scale = scaler.get_scale()
    scaler.update()
    is_skipped = scaler.get_scale() < scale
    return {**found, "grad_norm": None if is_skipped else norm, "loss_scale": scale}


def _loss(trained: nn.Module, rows: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    with _precision(settings, rows.device):
        loss: torch.Tensor = trained(input_ids=rows, labels=rows, use_cache=False).loss
    return loss


def _precision(settings: argparse.Namespace, device: torch.device) -> torch.autocast:
    """Autocast for DDP, whose parameters are fp32; sharded weights are gathered in 16 bits."""
    is_used = settings.parallel_strategy == "ddp" and settings.dtype != "fp32"
    dtype = COMPUTE_DTYPES[settings.dtype] if is_used else None
    return torch.autocast(device.type, dtype, enabled=is_used)


@torch.no_grad()
def _evaluate(trained: nn.Module, rows: torch.Tensor, settings: argparse.Namespace) -> float:
    trained.eval()
    parts = rows.split(settings.micro_batch_size)
    return _mean(torch.stack([_loss(trained, part, settings) for part in parts]).mean())


@torch.no_grad()
def _sample(model: Any, text: Text, settings: argparse.Namespace) -> str:
    """Continues the prompt. Every rank generates the same tokens."""
    model.eval()
    prompt = text.tokenizer(PROMPT, return_tensors="pt").to(model.device)
    positions = num_positions(model.config) or SAMPLE_TOKENS + prompt["input_ids"].shape[1]
    count = max(1, min(SAMPLE_TOKENS, positions - prompt["input_ids"].shape[1]))
    numbers = {"max_new_tokens": count, "min_new_tokens": count}
    with _precision(settings, model.device):
        tokens = model.generate(**prompt, **numbers, do_sample=False, use_cache=True)
    return str(text.tokenizer.decode(tokens[0]))


def _mean(value: torch.Tensor) -> float:
    """Returns the mean of a value over all ranks."""
    total = value.float()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _rate(step: int, steps: int) -> float:
    """Returns the factor of the learning rate: linear warm-up, then a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def _draw(settings: argparse.Namespace, records: Sequence[dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, style in (("loss", "-"), ("eval_loss", "o")):
        known = [record for record in records if name in record]
        axes.plot([r["step"] for r in known], [r[name] for r in known], style, label=name)
    axes.set(xlabel="step", ylabel="loss", title=f"{settings.model}, {settings.parallel_strategy}")
    axes.legend()
    figure.savefig(settings.out / "loss.png", bbox_inches="tight")
    pyplot.close(figure)


def _export(saved: Path, folder: Path, model: Any, text: Text) -> None:
    """Writes a folder for `from_pretrained`. One rank reads the checkpoint; the others wait."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        checkpoint.export(saved, folder / "model.safetensors")
        model.config.save_pretrained(folder)
        text.tokenizer.save_pretrained(folder)
    dist.barrier()
