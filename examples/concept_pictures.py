"""Draw the pictures of docs/concepts.md: `python -m examples.concept_pictures --out docs/images`.

Placements, rows and times are those of the package: its tables of strategies, its layout of
buffers, and a plan of a step. `muon_owners.py` and `pool_picture.py` draw the other pictures.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from torch import nn

from examples.plan_models import Decoder, Shape
from megatron_fsdp_v2._picture import picture_style
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.layout.placement import STRATEGIES, Placement
from megatron_fsdp_v2_cli import main as command

BLUE, ORANGE, GREEN, GRAY, PALE = "#4c78a8", "#f58518", "#54a24b", "#9d9da1", "#80808040"
RANK_COLORS = (BLUE, ORANGE, GREEN, "#b279a2")


def six_layers() -> nn.Module:
    """Six layers of the sizes of Llama-3 8B, with a small vocabulary."""
    return Decoder(Shape(4096, 14336, 6, vocabulary=32_000))


def overlap(path: Path) -> None:
    """Draw a planned step at ZeRO-3 on 64 GPUs: computation, gathers, reductions."""
    model = f"{six_layers.__module__}:{six_layers.__name__}"
    words = f"--ranks 64 --model {model} --param-dtype bf16 --grad-comm-dtype bf16 --tokens 2048"
    words += " --machine h100 --strategy optim_grads_params"
    with tempfile.TemporaryDirectory() as folder:
        step = str(Path(folder) / "step.json")
        command(["plan", *words.split(), "--timeline", step])
        command(["trace", step, "--out", str(path)])


def life_of_a_unit(path: Path) -> None:
    """Draw which buffers of a unit at ZeRO-3 have memory in each phase of a step."""
    phases = (
        ("idle", 1.0),
        ("gather", 1),
        ("forward", 2),
        ("others compute", 2),
        ("gather", 1),
        ("backward", 3),
        ("reduce", 1),
        ("others compute", 2),
        ("optimizer", 2),
        ("zero_grad", 1.5),
    )
    ends = [sum(width for _, width in phases[: i + 1]) for i in range(len(phases))]
    buffers = (
        ("main weight, shard", BLUE, ((0, ends[-1]),)),
        ("gathered weight, whole", GREEN, ((ends[0], ends[2]), (ends[3], ends[5]))),
        ("full gradient, whole", ORANGE, ((ends[4], ends[6]),)),
        ("main gradient, shard", BLUE, ((ends[5], ends[8]),)),
    )
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for row, (_, color, spans) in enumerate(buffers):
        axes.broken_barh([(a, b - a) for a, b in spans], (row - 0.35, 0.7), color=color)
    for end in (0, *ends):
        axes.axvline(end, color=GRAY, linewidth=0.5, linestyle=":")
    for (name, width), end in zip(phases, ends, strict=True):
        axes.text(end - width / 2, -0.6, name.replace(" ", "\n"), ha="center", va="bottom")
    axes.set_yticks(range(len(buffers)), [name for name, _, _ in buffers])
    axes.set(xlim=(0, ends[-1]), ylim=(len(buffers) - 0.5, -1.25), xlabel="time of one step")
    _plain(axes)
    axes.tick_params(bottom=False, labelbottom=False)
    _save(figure, path)


def buffers_by_strategy(path: Path) -> None:
    """Draw what each of four ranks holds of the three tensors, for every strategy."""
    ranks, rows = 4, ("model_weight", "main_weight", "unreduced_grad")
    names = ("model weight", "main weight,\nmain gradient", "gradient between\nmicro-batches")
    figure, grid = plt.subplots(
        len(rows), len(STRATEGIES), figsize=(10, 4.4), layout="constrained", squeeze=False
    )
    for column, (strategy, placements) in enumerate(STRATEGIES.items()):
        for row, tensor in enumerate(rows):
            axes, placement = grid[row][column], getattr(placements, tensor)
            for rank in range(ranks):
                axes.barh(rank, 1, color=PALE)
                start, width = (rank / ranks, 1 / ranks) if placement is Placement.SHARD else (0, 1)
                hatch = "///" if placement is Placement.PARTIAL else ""
                axes.barh(
                    rank, width, left=start, color=RANK_COLORS[rank], hatch=hatch, edgecolor="white"
                )
            axes.set(ylim=(ranks - 0.4, -0.6), xlim=(0, 1), xlabel=placement.value)
            axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            axes.tick_params(bottom=False, labelbottom=False, labelleft=column == 0, left=False)
            _plain(axes)
            if row == 0:
                axes.set_title(strategy, fontfamily="monospace", fontsize=10)
            if column == 0:
                axes.set_ylabel(names[row])
    _save(figure, path)


def checkpoint(path: Path) -> None:
    """Draw the rows of a unit's parameters that four ranks save and three ranks load."""
    shapes = {"q": (8, 16), "k": (4, 16), "up": (20, 16), "norm": (16,), "down": (16, 20)}
    sides = [
        (f"rank {{}} of {ranks} {verb}", ranks) for verb, ranks in (("saves", 4), ("loads", 3))
    ]
    figure, all_axes = plt.subplots(2, 1, figsize=(10, 3), layout="constrained", sharex=True)
    for axes, (label, ranks) in zip(all_axes, sides, strict=True):
        layout = BufferLayout.plan(shapes.values(), ranks)
        start = 0.0
        for index, (name, shape) in enumerate(shapes.items()):
            numel = float(math.prod(shape))
            for rank, (first, last) in enumerate(layout.row_ranges(index)):
                row = numel / shape[0]
                axes.barh(
                    0,
                    (last - first) * row,
                    left=start + first * row,
                    color=RANK_COLORS[rank],
                    edgecolor="white",
                )
            axes.text(start + numel / 2, 0.62, name, ha="center", va="bottom")
            start += numel + 12
        handles = [Rectangle((0, 0), 1, 1, color=RANK_COLORS[rank]) for rank in range(ranks)]
        axes.legend(
            handles,
            [label.format(rank) for rank in range(ranks)],
            ncols=ranks,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.02),
        )
        axes.set(ylim=(-0.5, 1.1), yticks=[])
        axes.tick_params(bottom=False, labelbottom=False)
        _plain(axes)
    _save(figure, path)


def _plain(axes: Any) -> None:
    axes.spines[:].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draw all pictures into a folder."""
    parser = argparse.ArgumentParser(prog="python -m examples.concept_pictures")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out: Path = parser.parse_args().out
    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "concepts", "font.size": 9})
    with picture_style():
        life_of_a_unit(out / "life_of_a_unit.svg")
        buffers_by_strategy(out / "buffers_by_strategy.svg")
        checkpoint(out / "checkpoint_rows.svg")
    overlap(out / "overlap.png")


if __name__ == "__main__":
    main()
