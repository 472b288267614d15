"""Where a `torch_dist` checkpoint keeps what a sharded parameter is made of.

Megatron's modules describe themselves: which tensor of the checkpoint a parameter lies in, at
which layer and expert, in which pieces. They are asked with stubs of the shapes that Megatron
itself would see, so that whatever it can save is understood here without a list of names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

__all__ = ["StoredBlock", "stored_blocks"]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a parameter that lies in one place of a checkpoint.

    Attributes:
        key: Name of the tensor in the checkpoint.
        start: Where the block starts in this tensor-parallel rank's part of the parameter.
        size: How long it is, per dimension.
        offset: Where it starts in the checkpoint's tensor, which may have more dimensions in front:
            layers, experts.
        shape: Shape of the checkpoint's tensor.
        is_padded: Whether that may be of another length: a vocabulary is padded by parallel sizes.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_padded: bool


def stored_blocks(
    chunk: Any, metadata: dict[str, Any]
) -> list[tuple[torch.Tensor, list[StoredBlock]]]:
    """Find where a checkpoint keeps the parameters and buffers of a model chunk.

    Args:
        chunk: The chunk without its wrappers, sharded.
        metadata: What Megatron's `sharded_state_dict` is to be told about the checkpoint.

    Returns:
        Every parameter or saved buffer with its blocks.

    Raises:
        RuntimeError: Megatron rearranges a parameter when it saves it, in a way not known here.
    """
    with _stand_ins(chunk) as originals:
        described = chunk.sharded_state_dict(metadata=dict(metadata))
        found = []
        for entry in nested_values(described):
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue
            data = entry.data
            blocks = [_block(piece, data) for piece in _pieces(entry)]
            found.append((originals.get(data, data), blocks))
    return found


@contextlib.contextmanager
def _stand_ins(chunk: nn.Module) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Register parameters of this rank's part, without memory, while something asks for shapes.

    Yields:
        What each of them stands for.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    sites = []
    for module in chunk.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if param not in stand_ins:
                shape = param.part_shape if isinstance(param, UnevenDTensor) else param.shape
                data = torch.empty(shape, dtype=param.dtype, device="meta")
                stand_ins[param] = nn.Parameter(data, requires_grad=False)
            sites.append((module, name, param))
    try:
        for module, name, param in sites:
            module._parameters[name] = stand_ins[param]
        yield {stand_in: param for param, stand_in in stand_ins.items()}
    finally:
        for module, name, param in sites:
            module._parameters[name] = param


def _pieces(entry: Any) -> Iterator[Any]:
    if isinstance(entry, ShardedTensor):
        yield entry
        return
    for piece in nested_values(entry.build()):
        if isinstance(piece, ShardedTensor):
            yield piece


def _block(piece: Any, whole: torch.Tensor) -> StoredBlock:
    view: torch.Tensor = piece.data
    if view.dim() != whole.dim() or view.stride() != whole.stride():
        raise RuntimeError(
            f"Megatron saves {piece.key} in another arrangement than it computes with; a "
            "torch_dist checkpoint of it cannot be loaded into sharded parameters"
        )
    start, rest = [], int(view.storage_offset()) - int(whole.storage_offset())
    for stride in whole.stride():
        start.append(rest // stride)
        rest %= stride
    return StoredBlock(
        key=piece.key,
        start=tuple(start),
        size=tuple(view.shape),
        offset=tuple(piece.global_offset),
        shape=tuple(piece.global_shape),
        is_padded=bool(piece.allow_shape_mismatch),
    )
