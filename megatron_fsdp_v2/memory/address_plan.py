"""Address plans: offsets of temporary buffers in one block of memory, from allocation traces.

Integers only. A buffer is a key, numbered from 0. A set of buffers is an integer whose bit `key` is
1 if the buffer is in the set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 512
"""Alignment of offsets in bytes, as in CUDA's caching allocator."""

CLOSE_ENOUGH = 0.002
"""Excess over the lower bound, as a fraction, at which the search for a better plan stops."""

MAX_ROUNDS = 40
"""Maximum number of improvements of one placement order."""


def keys_of(mask: int) -> Iterator[int]:
    """Yield the keys in a set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@dataclass(frozen=True, slots=True)
class Trace:
    """Allocations and frees of buffers in a part of a run.

    Attributes:
        live_before: Set of the buffers that had memory at the beginning.
        events: In order: `key` if a buffer acquired memory, `~key` if it released memory. Events
            without effect are allowed.
    """

    live_before: int
    events: tuple[int, ...]

    def measure(self, sizes: Sequence[int], conflicts: list[int]) -> tuple[int, int]:
        """Add to each buffer's conflicts the buffers that are live at the same time.

        Args:
            sizes: Bytes per key.
            conflicts: A set per key; changed in place.

        Returns:
            Set of the buffers that are live at any time, and the largest sum of live bytes.
        """
        live = used = self.live_before
        nbytes = peak = sum(sizes[key] for key in keys_of(live))
        for key in keys_of(live):
            conflicts[key] |= live & ~(1 << key)
        for event in self.events:
            key = max(event, ~event)
            if event >= 0 and not live >> key & 1:
                conflicts[key] |= live
                for other in keys_of(live):
                    conflicts[other] |= 1 << key
                live |= 1 << key
                nbytes += sizes[key]
            elif event < 0 and live >> key & 1:
                live ^= 1 << key
                nbytes -= sizes[key]
            used |= live
            peak = max(peak, nbytes)
        return used, peak


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An address for every buffer, such that buffers live at the same time do not overlap.

    Attributes:
        sizes: Bytes per key.
        offsets: First byte per key, a multiple of `ALIGNMENT`; None for a key without a trace.
        nbytes: Bytes of the block.
        lower_bound: Largest sum of bytes live at the same time; no plan can be smaller.
        overlaps: Per key, a bit set of the other keys whose byte ranges overlap its own.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    nbytes: int
    lower_bound: int
    overlaps: tuple[int, ...]

    @property
    def excess(self) -> float:
        """Excess of the plan's size over its lower bound, as a fraction of the bound."""
        return self.nbytes / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def place(self, key: int) -> int | None:
        """Return a buffer's offset in bytes, or None if the plan does not contain it."""
        return self.offsets[key] if key < len(self.offsets) else None

    def slots(self) -> list[tuple[range, list[int]]]:
        """Return disjoint ranges of bytes, by offset, each with the keys of the buffers in it."""
        slots: list[tuple[range, list[int]]] = []
        for start, key in sorted((o, k) for k, o in enumerate(self.offsets) if o is not None):
            end = start + -(-self.sizes[key] // ALIGNMENT) * ALIGNMENT
            if slots and start < slots[-1][0].stop:
                shared, keys = slots.pop()
                slots.append((range(shared.start, max(end, shared.stop)), [*keys, key]))
            else:
                slots.append((range(start, end), [key]))
        return slots

    def text(self, names: Sequence[str]) -> str:
        """Return a human-readable table of the ranges that buffers share.

        Args:
            names: Name per key.
        """
        planned = sum(s for s, o in zip(self.sizes, self.offsets, strict=True) if o is not None)
        slots = self.slots()
        lines = [
            f"{self.nbytes:,} bytes in {len(slots)} slots; lower bound {self.lower_bound:,} "
            f"bytes, {self.excess:+.1%}; without sharing {planned:,} bytes",
            f"{'slot':>4}  {'offset':>14}  {'bytes':>14}  buffers",
        ]
        for number, (place, keys) in enumerate(slots):
            shared = ", ".join(names[key] for key in keys)
            lines.append(f"{number:>4}  {place.start:>14,}  {len(place):>14,}  {shared}")
        return "\n".join(lines)


def plan_memory(
    sizes: Sequence[int], conflicts: Sequence[int], used: int, lower_bound: int
) -> MemoryPlan:
    """Assign addresses in one block, such that conflicting buffers do not overlap.

    Finding the smallest block is NP-hard. This function places buffers by first fit in several
    orders, and improves each order by placing the buffers that end highest first. For buffers that
    live in the order of layers, the result meets the lower bound. The plan is deterministic, so
    that equal arguments give equal plans on all ranks.

    Args:
        sizes: Bytes per key.
        conflicts: Per key, the set of keys that may be live at the same time.
        used: Set of the keys to place.
        lower_bound: Largest sum of bytes live at the same time.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    keys = list(keys_of(used))
    target = int(lower_bound * (1 + CLOSE_ENOUGH))
    first, *others = _orders(keys, aligned, conflicts)
    best = _improved(first, aligned, conflicts, target)
    for order in others:
        if _end(best, aligned) <= target:
            break
        offsets = _improved(order, aligned, conflicts, target)
        best = min(best, offsets, key=lambda placed: _end(placed, aligned))
    return MemoryPlan(
        sizes=tuple(sizes),
        offsets=tuple(best.get(key) for key in range(len(sizes))),
        nbytes=_end(best, aligned),
        lower_bound=lower_bound,
        overlaps=_overlaps(best, aligned),
    )


def _orders(keys: list[int], sizes: Sequence[int], conflicts: Sequence[int]) -> Iterator[list[int]]:
    """Yield placement orders. Keys are numbered in the order in which units are made."""
    weights = {key: sum(sizes[other] for other in keys_of(conflicts[key])) for key in keys}
    yield sorted(keys, key=lambda key: -sizes[key])
    yield sorted(keys, key=lambda key: (-sizes[key], -weights[key]))
    yield sorted(keys, key=lambda key: -weights[key])
    yield keys
    yield keys[::-1]


def _improved(
    order: list[int], sizes: Sequence[int], conflicts: Sequence[int], target: int
) -> dict[int, int]:
    """Return the best of several rounds; each places the last round's highest buffers first."""
    best = offsets = _first_fit(order, sizes, conflicts)
    for _ in range(MAX_ROUNDS):
        end = _end(offsets, sizes)
        if end <= target:
            break
        highest = {key for key in order if offsets[key] + sizes[key] == end}
        if highest == set(order[: len(highest)]):
            break
        order = [k for k in order if k in highest] + [k for k in order if k not in highest]
        offsets = _first_fit(order, sizes, conflicts)
        best = min(best, offsets, key=lambda placed: _end(placed, sizes))
    return best


def _end(offsets: dict[int, int], sizes: Sequence[int]) -> int:
    return max((offset + sizes[key] for key, offset in offsets.items()), default=0)


def _first_fit(
    order: Sequence[int], sizes: Sequence[int], conflicts: Sequence[int]
) -> dict[int, int]:
    """Place each buffer at the lowest address without a conflict with placed buffers."""
    offsets: dict[int, int] = {}
    placed = 0
    for key in order:
        taken = sorted((offsets[k], sizes[k]) for k in keys_of(conflicts[key] & placed))
        offset = 0
        for start, size in taken:
            if offset + sizes[key] <= start:
                break
            offset = max(offset, start + size)
        offsets[key] = offset
        placed |= 1 << key
    return offsets


def _overlaps(offsets: dict[int, int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return, for each key, a bit set of the keys whose byte ranges overlap its own."""
    overlaps = [0] * len(sizes)
    for one, other in itertools.combinations(offsets, 2):
        start = max(offsets[one], offsets[other])
        if start < min(offsets[one] + sizes[one], offsets[other] + sizes[other]):
            overlaps[one] |= 1 << other
            overlaps[other] |= 1 << one
    return tuple(overlaps)
