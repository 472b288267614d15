"""Meshes, made once in a process: every new one makes process groups that are never ended."""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """A CPU mesh of 1 axis (inner) or 2 (outer, inner)."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
