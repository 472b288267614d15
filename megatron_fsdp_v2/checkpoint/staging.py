"""What is written of an entry by this rank, fixed at one moment."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, override

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.host_memory import HostCopies, HostMemory
from megatron_fsdp_v2.checkpoint.packing import pack
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = ["Planner", "Staged", "stage", "stage_object"]


@dataclass(frozen=True, slots=True)
class _Shard:
    """Blocks of a sharded tensor, with the values of one moment.

    Attributes:
        items: What torch's checkpoint is told of them.
        blocks: Their values, by offset in the whole.
    """

    items: tuple[WriteItem, ...]
    blocks: Mapping[torch.Size, torch.Tensor]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del fqn, obj
        return list(self.items)


@dataclass(frozen=True, slots=True)
class _Object:
    """Something other than a tensor, as the bytes that are written.

    Attributes:
        content: The bytes.
        is_written: Whether this rank offers it; of several ranks that do, any one writes it.
    """

    content: bytes
    is_written: bool = True

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del obj
        item = WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)
        return [item] if self.is_written else []


@dataclass(frozen=True, slots=True)
class Staged:
    """What is written.

    Attributes:
        entries: By name.
        copies: The memory that values were copied to; None where they were not.
    """

    entries: dict[str, Any]
    copies: HostCopies | None = None


class Planner(DefaultSavePlanner):
    """Torch's own planner, for staged entries.

    Args:
        paths: Of what was flattened, where each entry was; written for those who want it back.
    """

    def __init__(self, paths: Mapping[str, Any] | None = None) -> None:
        super().__init__(flatten_state_dict=paths is not None, flatten_sharded_tensors=False)
        self._paths = paths

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the entries."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._paths is not None:
            self.mappings = dict(self._paths)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of what is written."""
        entry = self.state_dict[index.fqn]
        if isinstance(entry, _Shard):
            assert index.offset is not None
            return entry.blocks[index.offset]
        return super().lookup_object(index)

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The same, ready to be written."""
        if isinstance(object, _Object):
            return io.BytesIO(object.content)
        return super().transform_object(write_item, object)


def stage(
    entries: Mapping[str, Any],
    *,
    memory: HostMemory | None,
    to_bytes: Callable[[str, Any], bytes] = pack,
) -> Staged:
    """Fix what is written.

    Args:
        entries: Tensors and objects by name.
        memory: Where to copy values to, so that they may change afterwards; None for references.
        to_bytes: Makes of an object, given its name, the bytes that are written.

    Raises:
        CheckpointError: An entry is neither a tensor nor plain data.
    """
    if memory is None:
        staged = {n: _staged(n, v, torch.Tensor.detach, to_bytes) for n, v in entries.items()}
        return Staged(staged)
    found = (value for value in entries.values() if isinstance(value, torch.Tensor))
    tensors = [local_of(value) if isinstance(value, DTensor) else value for value in found]
    devices = [t.device for t in tensors if t.device.type != "cpu"]
    device = devices[0] if devices else torch.device("cpu")
    copies = memory.lend(sum(map(HostCopies.nbytes_of, tensors)), device)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return copies.copy(tensor.detach())

    staged = {name: _staged(name, value, copied, to_bytes) for name, value in entries.items()}
    copies.wait()
    return Staged(staged, copies)


def _staged(
    name: str,
    value: Any,
    taken: Callable[[torch.Tensor], torch.Tensor],
    to_bytes: Callable[[str, Any], bytes],
) -> Any:
    if isinstance(value, UnevenDTensor) and not value.numel():
        # No rank holds a block of it, and a checkpoint names it all the same.
        return local_of(value).detach().new_empty(value.shape)
    if isinstance(value, UnevenDTensor):
        local = taken(local_of(value))
        blocks = {torch.Size(chunk.offsets): local[chunk.local] for chunk in value.chunks()}
        return _Shard(tuple(value.__create_write_items__(name, value)), blocks)
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{name} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use torch's "
            "own torch.distributed.checkpoint.save for such a model"
        )
    if isinstance(value, torch.Tensor):
        return taken(value)
    return _Object(to_bytes(name, value))


def stage_object(name: str, value: Any, *, is_written: bool) -> Any:
    """Fix something that is kept as one object even if it is a tensor.

    Args:
        name: Its name.
        value: Plain data.
        is_written: Whether this rank's is the one that is kept.

    Raises:
        CheckpointError: It could not be loaded again.
    """
    return _Object(pack(name, value), is_written)
