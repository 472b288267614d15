"""Where temporary buffers lie in one block of memory: from traces of their lives to offsets.

Integers only. A buffer is a key, a number counted from 0; sets of buffers are integers whose bit
`key` says whether a buffer is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "MemoryPlan", "Slot", "Trace", "keys_of", "plan_memory"]

ALIGNMENT = 512
"""Bytes that offsets are a multiple of, as those of a GPU's caching allocator are."""

CLOSE_ENOUGH = 0.002
"""Fraction of the lower bound that a plan may be above it without a search for a better one."""

MAX_ROUNDS = 40
"""How often an order of placement is improved."""


def keys_of(mask: int) -> Iterator[int]:
    """The keys in a set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened to buffers in a stretch of a run.

    Attributes:
        live_before: Set of the buffers that had memory when it began.
        events: In order: `key` where a buffer got memory or was rejected it, `~key` where it lost
            it. What changes nothing may be among them.
    """

    live_before: int
    events: tuple[int, ...]

    def changes(self) -> Iterator[tuple[int, int]]:
        """The events that change something, each with the set of buffers live before it."""
        live = self.live_before
        for event in self.events:
            after = live | 1 << event if event >= 0 else live & ~(1 << ~event)
            if after != live:
                yield event, live
            live = after

    def used(self) -> int:
        """Set of the buffers that are live at some time."""
        used = self.live_before
        for event in self.events:
            used |= 1 << event if event >= 0 else 0
        return used

    def peak(self, sizes: Sequence[int]) -> int:
        """Largest sum of live bytes."""
        nbytes = peak = sum(sizes[key] for key in keys_of(self.live_before))
        for event, _ in self.changes():
            nbytes += sizes[event] if event >= 0 else -sizes[~event]
            peak = max(peak, nbytes)
        return peak

    def add_conflicts(self, conflicts: list[int]) -> None:
        """Add to each buffer's set of conflicts those it is live together with.

        Args:
            conflicts: A set for every key; changed in place.
        """
        for key in keys_of(self.live_before):
            conflicts[key] |= self.live_before & ~(1 << key)
        for event, live in self.changes():
            if event >= 0:
                conflicts[event] |= live
                for key in keys_of(live):
                    conflicts[key] |= 1 << event


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of the block that some buffers share, none of which reaches beyond it.

    Attributes:
        offset: First byte.
        nbytes: Bytes.
        keys: The buffers.
    """

    offset: int
    nbytes: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An address for every buffer, such that no two that live together overlap.

    Attributes:
        sizes: Bytes of every key.
        offsets: First byte of every key, a multiple of `ALIGNMENT`; None for one that no trace
            has.
        nbytes: Bytes of the block.
        lower_bound: Largest sum of bytes that are live together; no plan is smaller.
        overlaps: For every key, the set of the others that share bytes with it.
        slots: Who shares what, by offset.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    nbytes: int
    lower_bound: int
    overlaps: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def excess(self) -> float:
        """How far the plan is above its lower bound, as a fraction of it."""
        return self.nbytes / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def place(self, key: int, nbytes: int) -> int | None:
        """Where a buffer lies, or None if the plan does not have it.

        Args:
            key: The buffer.
            nbytes: Bytes it needs.

        Raises:
            ValueError: It needs more than it was planned with.
        """
        if key >= len(self.offsets) or self.offsets[key] is None:
            return None
        if nbytes > self.sizes[key]:
            raise ValueError(
                f"buffer {key} asks for {nbytes} bytes, and the plan has {self.sizes[key]} for it; "
                "make a plan with the larger size"
            )
        return self.offsets[key]

    def text(self, names: Sequence[str]) -> str:
        """A table of slots, human-readable.

        Args:
            names: Of every key.
        """
        lines = [
            f"{self.nbytes:,} bytes in {len(self.slots)} slots; lower bound {self.lower_bound:,} "
            f"bytes, {self.excess:+.1%}; without sharing {sum(self._planned_sizes()):,} bytes",
            f"{'slot':>4}  {'offset':>14}  {'bytes':>14}  buffers",
        ]
        for number, slot in enumerate(self.slots):
            shared = ", ".join(names[key] for key in slot.keys)
            lines.append(f"{number:>4}  {slot.offset:>14,}  {slot.nbytes:>14,}  {shared}")
        return "\n".join(lines)

    def _planned_sizes(self) -> Iterator[int]:
        return (s for s, o in zip(self.sizes, self.offsets, strict=True) if o is not None)


def plan_memory(
    sizes: Sequence[int], conflicts: Sequence[int], used: int, lower_bound: int
) -> MemoryPlan:
    """Give buffers addresses in one block, such that no two in conflict overlap.

    The smallest block is an NP-hard question. A few orders of placement are tried, with slots of
    one size (coloring) and with any addresses, and each is improved by placing first what lay
    highest. Where buffers live in the order of layers, the lower bound is met. The same arguments
    give the same plan on every rank.

    Args:
        sizes: Bytes of every key.
        conflicts: For every key, the set of those it may be live together with.
        used: Set of the keys to place.
        lower_bound: Largest sum of bytes that are live together.

    Raises:
        ValueError: A size is negative.
    """
    for key, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"sizes must not be negative, got {size} for buffer {key}")
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    keys = list(keys_of(used))
    target = int(lower_bound * (1 + CLOSE_ENOUGH))
    best: dict[int, int] = {}
    least: int | None = None
    for order in _orders(keys, aligned, conflicts):
        for way in (_colored, _first_fit):
            offsets = _improved(way, order, aligned, conflicts, target)
            nbytes = _end(offsets, aligned)
            if least is None or nbytes < least:
                best, least = offsets, nbytes
        if least is not None and least <= target:
            break
    return MemoryPlan(
        sizes=tuple(sizes),
        offsets=tuple(best.get(key) for key in range(len(sizes))),
        nbytes=least or 0,
        lower_bound=lower_bound,
        overlaps=_overlaps(best, aligned),
        slots=_slots(best, aligned),
    )


def _orders(keys: list[int], sizes: Sequence[int], conflicts: Sequence[int]) -> Iterator[list[int]]:
    """Orders in which to place buffers; keys are numbered as units are made."""
    weights = {key: sum(sizes[other] for other in keys_of(conflicts[key])) for key in keys}
    yield sorted(keys, key=lambda key: -sizes[key])
    yield sorted(keys, key=lambda key: (-sizes[key], -weights[key]))
    yield sorted(keys, key=lambda key: -weights[key])
    yield keys
    yield keys[::-1]


type _Way = Callable[[Sequence[int], Sequence[int], Sequence[int]], dict[int, int]]


def _improved(
    way: _Way, order: list[int], sizes: Sequence[int], conflicts: Sequence[int], target: int
) -> dict[int, int]:
    """The best of some rounds that each place first what was highest in the one before."""
    best = way(order, sizes, conflicts)
    least, offsets = _end(best, sizes), best
    for _ in range(MAX_ROUNDS):
        end = _end(offsets, sizes)
        if end <= target:
            break
        highest = {key for key in order if offsets[key] + sizes[key] == end}
        if highest == set(order[: len(highest)]):
            break
        order = [k for k in order if k in highest] + [k for k in order if k not in highest]
        offsets = way(order, sizes, conflicts)
        if _end(offsets, sizes) < least:
            best, least = offsets, _end(offsets, sizes)
    return best


def _end(offsets: dict[int, int], sizes: Sequence[int]) -> int:
    return max((offset + sizes[key] for key, offset in offsets.items()), default=0)


def _colored(
    order: Sequence[int], sizes: Sequence[int], conflicts: Sequence[int]
) -> dict[int, int]:
    """Slots that grow: each buffer goes where it wastes or adds least."""
    widths: list[int] = []
    members: list[int] = []
    slot_of: dict[int, int] = {}
    for key in order:
        free = [slot for slot, mask in enumerate(members) if not mask & conflicts[key]]
        slot = min(
            free,
            key=lambda s: (max(sizes[key] - widths[s], 0), widths[s]),
            default=None,
        )
        if slot is None:
            slot = len(widths)
            widths.append(0)
            members.append(0)
        widths[slot] = max(widths[slot], sizes[key])
        members[slot] |= 1 << key
        slot_of[key] = slot
    starts = list(itertools.accumulate(widths, initial=0))
    return {key: starts[slot] for key, slot in slot_of.items()}


def _first_fit(
    order: Sequence[int], sizes: Sequence[int], conflicts: Sequence[int]
) -> dict[int, int]:
    """Each buffer at the lowest address where nothing placed before is in conflict with it."""
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
    """Per key, the set of the others whose bytes it shares."""
    overlaps = [0] * len(sizes)
    # In order of offsets, so that those which reach into a buffer are among the ones before it.
    reaching: list[int] = []
    for key in sorted(offsets, key=lambda k: (offsets[k], k)):
        reaching = [k for k in reaching if offsets[k] + sizes[k] > offsets[key]]
        if sizes[key] == 0:
            continue
        for other in reaching:
            overlaps[key] |= 1 << other
            overlaps[other] |= 1 << key
        reaching.append(key)
    return tuple(overlaps)


def _slots(offsets: dict[int, int], sizes: Sequence[int]) -> tuple[Slot, ...]:
    """Stretches whose buffers do not reach beyond them."""
    slots: list[Slot] = []
    for key in sorted(offsets, key=lambda k: (offsets[k], k)):
        start, end = offsets[key], offsets[key] + sizes[key]
        last = slots[-1] if slots else None
        if last is not None and start < last.offset + last.nbytes:
            nbytes = max(end, last.offset + last.nbytes) - last.offset
            slots[-1] = Slot(last.offset, nbytes, (*last.keys, key))
        else:
            slots.append(Slot(start, end - start, (key,)))
    return tuple(slots)
