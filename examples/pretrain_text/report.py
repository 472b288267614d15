"""A picture and a short summary of the runs."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from examples.pretrain_text.settings import DDP, Settings
from examples.pretrain_text.training_log import ResumeProof, TrainingLog, averaged_iteration

_MAX_DIFFERENCES_SHOWN = 5


@dataclass(frozen=True)
class Results:
    """Results of the two runs.

    Attributes:
        settings: Settings of the runs.
        first: The uninterrupted run.
        resumed: The run that resumed from the checkpoint.
        proof: The comparison of both runs.
        picture: The loss curves.
    """

    settings: Settings
    first: TrainingLog
    resumed: TrainingLog
    proof: ResumeProof
    picture: Path


def strategy_words(strategy: str) -> str:
    """Names a strategy in a title.

    Args:
        strategy: The strategy as on the command line.

    Returns:
        The text.
    """
    return "Megatron's own DDP" if strategy == DDP else f"fully_shard, {strategy}"


def draw(
    settings: Settings, first: Mapping[int, str], resumed: Mapping[int, str], picture: Path
) -> None:
    """Draws the loss curves of both runs.

    Args:
        settings: Settings of the runs.
        first: Printed losses of the uninterrupted run, by iteration number.
        resumed: Printed losses of the resumed run.
        picture: The PNG file to write.
    """
    # A figure without pyplot needs no display.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        list(first), [float(loss) for loss in first.values()], label="first run", linewidth=1.5
    )
    # Megatron prints one loss as a mean, which would look like a difference.
    averaged = averaged_iteration(resumed)
    shown = {number: float(loss) for number, loss in resumed.items() if number != averaged}
    axes.plot(
        list(shown),
        list(shown.values()),
        label="resumed from the checkpoint",
        linestyle="none",
        marker="o",
        markersize=4,
        markerfacecolor="none",
    )
    axes.axvline(settings.half_way, color="gray", linestyle=":", label="checkpoint")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(
        f"Byte-level GPT in Megatron-Core: {strategy_words(settings.strategy)}, "
        f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''}, "
        f"{'CPU' if settings.on_cpu else 'CUDA'}",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


def folder_nbytes(folder: Path) -> int:
    """Adds up the files below a folder.

    Args:
        folder: The folder.

    Returns:
        Bytes of all its files.
    """
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show_summary(console: Console, results: Results) -> None:
    """Prints a short summary.

    Args:
        console: Output.
        results: Results of the two runs.
    """
    settings = results.settings
    losses = list(results.first.losses.values())
    evaluations = ", ".join(
        f"{name} {float(loss):.4f}" for name, loss in results.first.evaluations.items()
    )
    speed = results.first.tokens_per_second(settings.tokens_per_iteration)
    checkpoint = settings.half_way_checkpoint
    rows = {
        "strategy": f"{strategy_words(settings.strategy)}, {settings.ranks} ranks",
        "loss": f"first {float(losses[0]):.4f}, last {float(losses[-1]):.4f}",
        "evaluation": evaluations or "none",
        "speed": f"{speed:,.0f} tokens/s",
        "checkpoint": f"{checkpoint} ({folder_nbytes(checkpoint) / 1e6:.1f} MB)",
        "resume proof": describe(results.proof),
        "loss curve": str(results.picture),
    }
    tool = Path(sys.executable).with_name("megatron-fsdp-v2")
    steps = {
        "your text": "make pretrain TEXT=path/to/file_or_folder",
        "a checkpoint": f"{tool} ckpt inspect {checkpoint}",
        "your job": f"{tool} prove -- <its flags>",
        "its memory": f"{tool} plan --ranks 64 --machine h100 -- <its flags>",
        "these flags": f"the first line of {settings.first_log}",
        "all pages": "docs/index.md",
    }
    for part in (rows, steps):
        console.print("" if part is rows else "\nnext:")
        for name, value in part.items():
            # A wrapped path cannot be copied.
            console.print(f"{name:<14}{value}", soft_wrap=True, markup=False)


def describe(proof: ResumeProof) -> str:
    """Describes the comparison of the two runs.

    Args:
        proof: The comparison.

    Returns:
        A sentence that states whether the losses are equal, and which ones differ.
    """
    first, last = proof.expected.start, proof.expected.stop - 1
    if proof.holds:
        return f"holds: losses {first} to {last} of both runs are equal as printed"
    if proof.missing:
        return f"FAILED: {len(proof.missing)} of the losses {first} to {last} were not printed"
    shown = "; ".join(
        f"iteration {number}: {uninterrupted} uninterrupted, {resumed} resumed"
        for number, (uninterrupted, resumed) in list(proof.different.items())[
            :_MAX_DIFFERENCES_SHOWN
        ]
    )
    return f"FAILED: {len(proof.different)} of the losses {first} to {last} differ: {shown}"
