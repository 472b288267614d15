"""The training loop: steps, evaluations, samples of text, checkpoints, and an export."""

import argparse
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from examples.train_hf.setup import Text, build_model, build_optimizer, load_text, parallelize
from megatron_fsdp_v2 import checkpoint

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
    start, records = 0, []
    if settings.resume is not None:
        extra = checkpoint.load(settings.resume, model, optimizer)
        start, records = extra["step"], extra["records"]
        if start >= settings.steps:
            raise ValueError(f"--resume {settings.resume} is of step {start}: give more --steps")
    bar = tqdm(range(start, settings.steps), initial=start, total=settings.steps, disable=rank > 0)
    for step in bar:
        factor = _rate(step, settings.steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        # For dropout: other masks on every rank and in every step, the same ones after a resume.
        torch.manual_seed(settings.seed + 1 + step * num_ranks + rank)
        batch = text.batch(step, settings.batch_size)[rank::num_ranks].to(device)
        loss, norm = _step(trained, optimizer, batch, settings)
        records.append({"step": step + 1, "loss": loss, "grad_norm": norm})
        bar.set_postfix(loss=f"{loss:.4f}")
        is_last = step + 1 == settings.steps
        if is_last or (step + 1) % settings.eval_every == 0:
            held_out = text.held_out[rank::num_ranks].to(device)
            records[-1]["eval_loss"] = _evaluate(trained, held_out, settings)
            records[-1]["sample"] = _sample(model, text, settings)
        if is_last or (settings.save_every and (step + 1) % settings.save_every == 0):
            saved = settings.out / "checkpoints" / f"step_{step + 1:06d}"
            # On every rank: each one writes the rows that it has.
            checkpoint.save(saved, model, optimizer, extra={"step": step + 1, "records": records})
            if rank == 0:
                _report(settings, records)
            if is_last and settings.export is not None:
                _export(saved, settings.export, model, text)
    return records


def _check(settings: argparse.Namespace, num_ranks: int) -> None:
    """Checks the settings, and sets the micro-batch size if none is given."""
    for name in ("steps", "batch_size", "seq_length", "eval_every", "save_every"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if settings.lr is not None and not 0 < settings.lr < math.inf:
        raise ValueError(f"--lr {settings.lr} must be a positive number")
    if settings.micro_batch_size is None:
        settings.micro_batch_size = max(1, settings.batch_size // num_ranks)
    if settings.micro_batch_size < 1 or settings.batch_size % (
        num_ranks * settings.micro_batch_size
    ):
        raise ValueError(
            f"--batch-size {settings.batch_size} must be a multiple of the {num_ranks} ranks times "
            f"the micro-batch size {settings.micro_batch_size}"
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
    settings.out.mkdir(parents=True, exist_ok=True)


def _step(
    trained: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor, settings: argparse.Namespace
) -> tuple[float, float]:
    """Makes one step on this rank's rows; returns the loss of all ranks and the gradient norm."""
    trained.train()
    optimizer.zero_grad()
    parts = rows.split(settings.micro_batch_size)
    losses = []
    for part in parts:
        # Only the last backward reduces gradients over ranks.
        with contextlib.nullcontext() if part is parts[-1] else trained.no_sync():
            loss = _loss(trained, part, settings) / len(parts)
            loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()
    return _mean(torch.stack(losses).sum()), float(norm)


def _loss(trained: nn.Module, rows: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    with _precision(settings, rows.device):
        loss: torch.Tensor = trained(input_ids=rows, labels=rows, use_cache=False).loss
    return loss


def _precision(settings: argparse.Namespace, device: torch.device) -> torch.autocast:
    """Autocast for DDP, whose parameters are fp32; sharded weights are gathered in bf16."""
    is_used = settings.parallel_strategy == "ddp" and settings.dtype == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=is_used)


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
    numbers = {"max_new_tokens": SAMPLE_TOKENS, "min_new_tokens": SAMPLE_TOKENS}
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


def _report(settings: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (settings.out / "log.jsonl").write_text("".join(lines))
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
