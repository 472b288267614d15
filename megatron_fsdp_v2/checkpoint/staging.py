"""Stage entries for a save: their values as of one moment, and objects as bytes."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.host_memory import HostCopies, HostMemory
from megatron_fsdp_v2.checkpoint.torch_files import load_plain
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = [
    "Planner",
    "Staged",
    "pack",
    "stage",
    "stage_object",
]


_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.Size,
    torch.dtype,
    torch.device,
)


def pack(name: str, value: Any) -> bytes:
    """Serialize plain data, and check that it can be loaded without running code.

    Args:
        name: Its name in errors.
        value: Plain data. Of a tensor that is a view, only the view is written.

    Returns:
        The bytes of `torch.save`.

    Raises:
        CheckpointError: It, or a part of it, could not be loaded again; names the part.
    """
    try:
        plain = _plain(name, value)
        content = _saved(plain)
        _load(content)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply, or contains itself") from error
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{name} could not be loaded again ({reason})") from error
    return content


def _plain(path: str, value: Any) -> Any:
    """Copy containers, with tensors in host memory."""
    kind = type(value)
    if kind in (bytes, bytearray) and not value:
        raise CheckpointError(
            f"{path} is empty {kind.__name__}, which torch does not load as plain data; put None "
            "or an empty string there"
        )
    if kind in _LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(path, value)
    if kind in (dict, OrderedDict):
        pairs = [
            (_plain(f"a key of {path}", key), _plain(f"{path}[{key!r}]", item))
            for key, item in value.items()
        ]
        return kind(pairs)
    if kind in (list, tuple):
        return kind(_plain(f"{path}[{i}]", item) for i, item in enumerate(value))
    if kind is set:
        return {_plain(f"an element of {path}", item) for item in value}
    # Classes that the user allowed with torch.serialization.add_safe_globals pass this.
    try:
        _load(_saved(value))
    except Exception as error:
        raise CheckpointError(_refusal(path, type(value))) from error
    return value


def _plain_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}, of which every rank holds a part; only model "
            "and optimizer may hold such tensors, so put its full_tensor() there"
        )
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}, which would be loaded as a plain tensor; put a "
            "plain tensor there"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{path} is on the meta device and has no values to save")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor.cpu()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    # torch.save writes the whole storage of a view.
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if is_view else tensor


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(content: bytes) -> Any:
    return load_plain(io.BytesIO(content), "it")


def _refusal(path: str, kind: type) -> str:
    hint = "keep to numbers, strings, tuples, lists, dictionaries and tensors"
    if kind.__module__.partition(".")[0] == "numpy":
        hint = "save value.item() of a scalar and torch.from_numpy(value) of an array"
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return (
        f"{path} is of the type {name}, which a checkpoint does not keep, because loading it would "
        f"run code from the file; {hint}"
    )


@dataclass(frozen=True, slots=True)
class _Shard:
    """Staged blocks of a sharded tensor.

    Attributes:
        items: Write items for torch's planner.
        blocks: Values by offset in the whole tensor.
    """

    items: tuple[WriteItem, ...]
    blocks: Mapping[torch.Size, torch.Tensor]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del fqn, obj
        return list(self.items)


@dataclass(frozen=True, slots=True)
class _Object:
    """An object as the bytes that are written.

    Attributes:
        content: The bytes.
        is_written: Whether this rank may write it; of several ranks, any one does.
    """

    content: bytes
    is_written: bool = True

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del obj
        item = WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)
        return [item] if self.is_written else []


@dataclass(frozen=True, slots=True)
class Staged:
    """Staged entries.

    Attributes:
        entries: Entries by name.
        copies: Host memory that values were copied to; None if they were not copied.
    """

    entries: dict[str, Any]
    copies: HostCopies | None = None


class Planner(DefaultSavePlanner):
    """Torch's own planner, for staged entries.

    Args:
        paths: Path of each entry in the nested state dict; written to the metadata.
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
        """Set the entries."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._paths is not None:
            self.mappings = dict(self._paths)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of an item."""
        entry = self.state_dict[index.fqn]
        if isinstance(entry, _Shard):
            assert index.offset is not None
            return entry.blocks[index.offset]
        return super().lookup_object(index)

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return an item as torch writes it."""
        if isinstance(object, _Object):
            return io.BytesIO(object.content)
        return super().transform_object(write_item, object)


def stage(
    entries: Mapping[str, Any],
    *,
    memory: HostMemory | None,
    to_bytes: Callable[[str, Any], bytes] = pack,
) -> Staged:
    """Stage entries.

    Args:
        entries: Tensors and objects by name.
        memory: Host memory to copy values to, so that they may change afterwards; None to refer
            to the values.
        to_bytes: Serializes an object, given its name.

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
        # No rank holds a block of an empty tensor; it is written as one.
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
    """Stage a value as one object, even if it is a tensor.

    Args:
        name: Its name.
        value: Plain data.
        is_written: Whether this rank writes it.

    Raises:
        CheckpointError: It could not be loaded again.
    """
    return _Object(pack(name, value), is_written)
