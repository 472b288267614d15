"""List the contents of a checkpoint without reading a tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.checkpoint.exporting import CheckpointKind, find_kind, open_source
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import FORMAT_VERSION


def inspect(path: str | Path) -> dict[str, Any]:
    """List the contents of a checkpoint: a folder, a `.safetensors` file or index, or a `.pt` file.

    See `find_kind` for what a folder may hold.

    Returns:
        What `ckpt inspect` selects from: `path` and `kind`; `iteration`, from the name of the
        folder, or None; `tensors`, by the names they are stored as, each with its shape, dtype,
        bytes, number of chunks, and another name of the same chunks (`same_as`) if it is tied;
        `objects`, the other entries, each with its bytes in the file; the number and the bytes of
        all tensors; and `manifest`, what is known of the save, None without a manifest.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    kind, _ = find_kind(path)
    objects: dict[str, Any] = {}
    first: dict[object, str] = {}
    manifest: dict[str, Any] | None = None
    if kind is CheckpointKind.FOLDER:
        folder, found = CheckpointFolder(path), {}
        for key, entry in folder.entries.items():
            if entry.dtype is not None:
                same = first.setdefault(frozenset(entry.chunks) or key, key)
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                found[key] = tensor, len(entry.chunks), None if same == key else same
            else:
                objects[key] = {"nbytes": sum(chunk.length for chunk in entry.chunks)}
        if (saved := folder.manifest) is not None:
            manifest = {"version": FORMAT_VERSION, "world_size": saved.world_size}
            manifest |= {"torch": saved.torch, "files": len(folder.lengths)}
    else:
        found = {name: (tensor, 1, None) for name, tensor in open_source(path).tensors.items()}
    numbered = re.search(r"(?:iter|step)_0*(\d+)$", Path(path).resolve().name)
    return {
        "path": str(path),
        "kind": kind.value,
        "iteration": int(numbered[1]) if numbered else None,
        "manifest": manifest,
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
                "chunks": chunks,
                **({} if same_as is None else {"same_as": same_as}),
            }
            for name, (tensor, chunks, same_as) in found.items()
        },
        "objects": objects,
        "num_tensors": len(found),
        "nbytes": sum(tensor.nbytes for tensor, _, _ in found.values()),
    }
