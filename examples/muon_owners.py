"""Draw the owner of each matrix of Llama-3-8B's layers and the work per rank.

`python -m examples.muon_owners --ranks 8 --out owners.png`. Nothing is allocated and no process
group is needed: owners follow from shapes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from megatron_fsdp_v2._picture import picture_style
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.optim.exchange import plan_buckets
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout
from megatron_fsdp_v2.optim.newton_schulz import newton_schulz_flops
from megatron_fsdp_v2.optim.ownership import Matrix, Ownership

HIDDEN, FFN, KEYS = 4096, 14336, 1024
LAYER = {
    "q": (HIDDEN, HIDDEN),
    "k": (KEYS, HIDDEN),
    "v": (KEYS, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
BUCKET_NUMEL = 32 * 2**20


def plan(num_layers: int, ranks: int) -> tuple[list[MatrixLayout], Ownership, Grid]:
    """Plan the owners of the matrices of a stack of layers; each layer is a unit at ZeRO-3."""
    grid = Grid((ranks,), (True,))
    layouts: list[MatrixLayout] = []
    matrices: list[Matrix] = []
    for _ in range(num_layers):
        flat = BufferLayout.plan(LAYER.values(), ranks)
        for index, shape in enumerate(LAYER.values()):
            rows = RowShards(flat.row_ranges(index), (1,))
            layout = MatrixLayout(grid, rows, shape, (1,))
            matrices += Matrix.of(len(layouts), layout, newton_schulz_flops(*shape))
            layouts.append(layout)
    return layouts, Ownership.plan(matrices, ranks, BUCKET_NUMEL), grid


def draw(ownership: Ownership, num_layers: int, path: Path) -> None:
    """Draw a grid of layers by matrices, colored by owner, above bars of work per rank."""
    mpl.use("Agg")
    figure, (owners, work) = plt.subplots(
        2, 1, figsize=(9, 5), height_ratios=(2, 1), layout="constrained"
    )
    table = [[0] * num_layers for _ in LAYER]
    for matrix, owner in zip(ownership.matrices, ownership.owners, strict=True):
        layer, kind = divmod(matrix.param, len(LAYER))
        table[kind][layer] = owner
    ranks = len(ownership.flops)
    colors = plt.get_cmap("viridis", ranks)
    image = owners.imshow(table, aspect="auto", cmap=colors, vmin=-0.5, vmax=ranks - 0.5)
    owners.set_yticks(range(len(LAYER)), list(LAYER))
    owners.set_xlabel("layer")
    figure.colorbar(image, ax=owners, label="owner", ticks=range(0, ranks, max(1, ranks // 8)))
    mean = sum(ownership.flops) / ranks
    work.bar(range(ranks), [flops / mean for flops in ownership.flops], color=colors(range(ranks)))
    work.axhline(1.0, color="gray", linestyle=":")
    work.set_xlabel("rank")
    work.set_ylabel("Newton-Schulz work\nover the mean")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Print a table for several numbers of ranks and draw the picture for one."""
    parser = argparse.ArgumentParser(prog="python -m examples.muon_owners", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("muon_owners.png"))
    args = parser.parse_args()
    sys.stdout.write(f"{'ranks':>6}{'busiest over mean':>20}{'sent over own shard':>22}\n")
    for ranks in sorted({8, 16, 32, 64, args.ranks}):
        layouts, ownership, grid = plan(args.layers, ranks)
        shard = sum(rows * cols for rows, cols in LAYER.values()) * args.layers / ranks
        sent = [
            sum(bucket.sent_numel for bucket in plan_buckets(layouts, ownership, grid, rank))
            for rank in range(ranks)
        ]
        balance = max(ownership.flops) * ranks / sum(ownership.flops)
        sys.stdout.write(
            f"{ranks:6}{balance:20.3f}{sum(sent) / ranks / shard:12.2f} (mean)"
            f"{max(sent) / shard:8.2f} (most)\n"
        )
    with picture_style():
        draw(plan(args.layers, args.ranks)[1], args.layers, args.out)
    sys.stdout.write(f"written: {args.out}\n")


if __name__ == "__main__":
    main()
