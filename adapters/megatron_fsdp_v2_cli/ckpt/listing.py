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
    leaves, tensors = _matching(contents, pattern), contents["tensors"]
    rows = []
    for group, names in _groups(leaves, depth, largest_first=largest_first).items():
        size = readable_size(sum(leaves[name]["nbytes"] for name in names))
        if names[0] != group:
            count = sum(name in tensors for name in names)
            rows.append((group, f"{count} tensors", "", size))
        elif group in tensors:
            rows.append((group, str(tuple(leaves[group]["shape"])), leaves[group]["dtype"], size))
        else:
            rows.append((group, "", "object", size))
    found = [leaves[name]["nbytes"] for name in leaves if name in tensors]
    rows.append(("total", f"{len(found)} tensors", "", readable_size(sum(found))))
    yield from aligned(rows, left=(0, 1, 2))


def selected(
    contents: Mapping[str, Any],
    depth: int | None = None,
    *,
    pattern: str = "*",
    largest_first: bool = False,
) -> dict[str, Any]:
    """Return what `listing` shows as data for JSON.

    Args:
        contents: The result of `inspect`.
        depth: As in `listing`. Unless None, `groups` replaces `tensors` and `objects`: for the
            first parts of names, the number of tensors and of objects, and their bytes.
        pattern: As in `listing`; `num_tensors` and `nbytes` count these tensors alone.
        largest_first: As in `listing`.
    """
    leaves, tensors = _matching(contents, pattern), contents["tensors"]
    found: dict[str, Any] = {
        name: value for name, value in contents.items() if name not in ("tensors", "objects")
    }
    nbytes = [leaf["nbytes"] for name, leaf in leaves.items() if name in tensors]
    found |= {"num_tensors": len(nbytes), "nbytes": sum(nbytes)}
    groups = _groups(leaves, depth, largest_first=largest_first)
    if depth is None:
        found["tensors"] = {name: leaves[name] for name in groups if name in tensors}
        found["objects"] = {name: leaves[name] for name in groups if name not in tensors}
        return found
    found["groups"] = {
        group: {
            "num_tensors": sum(name in tensors for name in names),
            "num_objects": sum(name not in tensors for name in names),
            "nbytes": sum(leaves[name]["nbytes"] for name in names),
        }
        for group, names in groups.items()
    }
    return found


def _matching(contents: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the tensors and objects whose names match a pattern, by name."""
    return {
        name: leaf
        for name, leaf in (contents["tensors"] | contents["objects"]).items()
        if fnmatch.fnmatchcase(name, pattern)
    }


def _groups(
    leaves: Mapping[str, Any], depth: int | None, *, largest_first: bool
) -> dict[str, list[str]]:
    """Return the names of entries by the first parts of their names, in the order to show."""
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves, key=natural_order):
        groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    if not largest_first:
        return groups
    sizes = {group: sum(leaves[n]["nbytes"] for n in names) for group, names in groups.items()}
    return {group: groups[group] for group in sorted(groups, key=sizes.__getitem__, reverse=True)}
