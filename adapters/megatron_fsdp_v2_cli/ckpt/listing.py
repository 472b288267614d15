"""The contents of a checkpoint as text."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_fsdp_v2._text import aligned, readable_size
from megatron_fsdp_v2.checkpoint.entries import MODEL
from megatron_fsdp_v2.checkpoint.exporting import CheckpointKind, natural_order


def summary(contents: Mapping[str, Any]) -> Iterator[str]:
    """Format what is in a checkpoint, and who saved it, line by line. Tied tensors count once.

    Args:
        contents: The result of `inspect`.
    """
    known, tensors = contents["manifest"], contents["tensors"]
    iteration = contents["iteration"]
    yield contents["path"] + ("" if iteration is None else f", iteration {iteration}")
    if known:
        yield (
            f"saved by {known['world_size']} ranks with torch {known['torch']}, "
            f"{known['files']} files, manifest of version {known['version']}"
        )
    elif contents["kind"] == CheckpointKind.FOLDER.value:
        yield "saved by another program: no manifest"
    # Without a prefix for the model, everything is the model.
    has_parts = known or any(name.startswith(MODEL) for name in tensors)
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if "same_as" not in tensor:
            parts[name.partition(".")[0] if has_parts else MODEL[:-1]].append(tensor)
    rows = [
        (
            part,
            f"{sum(math.prod(tensor['shape']) for tensor in found):,} elements",
            f"{len(found)} tensors",
            readable_size(sum(tensor["nbytes"] for tensor in found)),
            ", ".join(sorted({tensor["dtype"] for tensor in found})),
        )
        for part, found in sorted(parts.items())
    ]
    yield from aligned(rows, left=(0, 4))


def listing(
    contents: Mapping[str, Any],
    depth: int | None = None,
    *,
    pattern: str = "*",
    largest_first: bool = False,
) -> Iterator[str]:
    """Format names with shapes, dtypes and sizes, line by line.

    Args:
        contents: The result of `inspect`.
        depth: Parts of names to show; entries with the same first parts are added up. None shows
            every entry.
        pattern: Names to show, with `*` and `?` as in file names.
        largest_first: Whether to sort by size instead of by name.
    """
    leaves = {
        name: leaf
        for name, leaf in (contents["tensors"] | contents["objects"]).items()
        if fnmatch.fnmatchcase(name, pattern)
    }
    tensors = contents["tensors"].keys() & leaves.keys()
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves, key=natural_order):
        groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    sizes = {group: sum(leaves[n]["nbytes"] for n in names) for group, names in groups.items()}
    rows = []
    for group in sorted(groups, key=sizes.__getitem__, reverse=True) if largest_first else groups:
        names, size = groups[group], readable_size(sizes[group])
        if names[0] != group:
            rows.append((group, f"{len(tensors & set(names))} tensors", "", size))
        elif group in tensors:
            rows.append((group, str(tuple(leaves[group]["shape"])), leaves[group]["dtype"], size))
        else:
            rows.append((group, "", "object", size))
    total = sum(leaves[name]["nbytes"] for name in tensors)
    rows.append(("total", f"{len(tensors)} tensors", "", readable_size(total)))
    yield from aligned(rows, left=(0, 1, 2))
