"""Shapes of real units, and what no row sharding of them can go below. Derived in docs/layout.md.

Nothing here is shared with the planner: these are independent statements to hold it against. All
numbers are elements of a slice, all flat buffers together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]


def _llama(hidden: int, ffn: int, kv: int = 1024) -> list[Shape]:
    """A decoder layer: q, k, v, o, gate, up, down, two norms."""
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]


def _deepseek_v3(experts: int) -> list[Shape]:
    """A layer with latent attention; `experts` routed ones and one shared, or 0 for a dense one."""
    hidden, ffn = 7168, 2048 if experts else 18432
    q_a, kv_a = [(1536, hidden), (1536,)], [(576, hidden), (512,)]
    attention = [*q_a, (24576, 1536), *kv_a, (32768, 512), (hidden, 16384)]
    router = [(experts, hidden)] if experts else []
    mlp = [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * (experts + 1)
    return [*attention, *router, *mlp, (hidden,), (hidden,)]


UNITS: dict[str, list[Shape]] = {
    "Llama-3 8B": _llama(4096, 14336),
    "Llama-3 70B": _llama(8192, 28672),
    "Llama-3 405B": _llama(16384, 53248),
    "DeepSeek-V3, dense": _deepseek_v3(0),
    "DeepSeek-V3, 256 experts": _deepseek_v3(256),
}
RANKS = (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)


def scattered_bound(shapes: Sequence[Shape], num_shards: int) -> int:
    """Least slice if every row could go anywhere, but whole: a bound for packing rows in bins.

    The slice cannot be less than a row or than the average. Nor can it be one whose bins the rows
    provably overfill: with `x` for a row's part of a slice and any whole `k`, count a row as
    `floor((k + 1) x) / k`, or as `x` where `(k + 1) x` is whole. Rows that fit in one bin count at
    most 1 together (Fekete and Schepers), so all rows must count at most `num_shards`.
    """
    rows: dict[int, int] = {}
    for shape in shapes:
        rows[math.prod(shape[1:])] = rows.get(math.prod(shape[1:]), 0) + shape[0]

    def overfills(size: int, k: int) -> bool:
        count = 0  # Times k and size, to stay whole.
        for row, number in rows.items():
            whole, rest = divmod((k + 1) * row, size)
            count += number * (whole * size if rest else row * k)
        return count > num_shards * k * size

    total = sum(math.prod(shape) for shape in shapes)
    low = max(-(-total // num_shards), *rows) - 1
    high = low + 1
    while any(overfills(high, k) for k in range(1, 65)):
        low, high = high, 2 * high
    # What a row counts falls as the slice grows, so the sizes ruled out are an interval.
    while high - low > 1:
        middle = (low + high) // 2
        if any(overfills(middle, k) for k in range(1, 65)):
            low = middle
        else:
            high = middle
    return high


def contiguous_bound(shapes: Sequence[Shape], num_shards: int) -> int:
    """Least slice of any split into flat buffers, where every matrix is longer than two slices.

    Row sizes that one matrix has alone go to one buffer with it; of the row size that several
    matrices share (there must be one at most), any number of rows may go to any buffer, which
    forgets that these matrices are contiguous too. One-dimensional parameters are left out. Both
    only lower the bound.

    Raises:
        ValueError: Several row sizes are shared, or a matrix is not longer than two slices.
    """
    by_row: dict[int, list[int]] = {}
    for shape in shapes:
        if len(shape) > 1:
            by_row.setdefault(math.prod(shape[1:]), []).append(math.prod(shape))
    shared = [row for row, numels in by_row.items() if len(numels) > 1]
    if len(shared) > 1:
        raise ValueError(f"several row sizes are shared: {shared}")
    row = shared[0] if shared else 1
    shared_numel = sum(by_row[row]) if shared else 0
    singles = [(r, numels[0]) for r, numels in by_row.items() if len(numels) == 1]
    # Every row size in a buffer of its own.
    best = sum(-(-sum(n) // (num_shards * r)) * r for r, n in by_row.items())
    if min(min(numels) for numels in by_row.values()) <= 2 * best:
        raise ValueError("a matrix is not longer than two slices, so the bound does not hold")
    for partition in _partitions(singles):
        best = min(best, _least(partition, row, shared_numel, num_shards, best))
    return best


def _least(
    blocks: Sequence[Sequence[tuple[int, int]]], row: int, numel: int, num_shards: int, limit: int
) -> int:
    """Least slices of buffers for these blocks and one for what they do not take in of `numel`."""
    if not blocks:
        return -(-max(numel, 0) // (num_shards * row)) * row
    fixed = sum(n for _, n in blocks[0])
    least = -(-fixed // num_shards)
    alone = math.lcm(*(r for r, _ in blocks[0]))
    together = math.lcm(alone, row)
    sizes = [(-(-least // alone) * alone, 0)]
    for size in range(-(-least // together) * together, limit, together):
        sizes.append((size, num_shards * size - fixed))
        if num_shards * size - fixed >= numel:
            break
    best = limit
    for size, room in sizes:
        if size < best:
            rest = _least(blocks[1:], row, numel - room, num_shards, best - size)
            best = min(best, size + rest)
    return best


def _partitions(
    items: Sequence[tuple[int, int]],
) -> Iterator[list[list[tuple[int, int]]]]:
    """Every partition of the items."""
    for labels in itertools.product(*(range(i + 1) for i in range(len(items)))):
        if sorted(set(labels)) == list(range(len(set(labels)))):
            blocks: list[list[tuple[int, int]]] = [[] for _ in set(labels)]
            for label, item in zip(labels, items, strict=True):
                blocks[label].append(item)
            yield blocks
