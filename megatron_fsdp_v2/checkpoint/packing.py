"""Objects of a checkpoint: turned into bytes that load again without running code, or rejected.

What is saved must be loadable, so it is loaded once before anything is written. What does not load
is found by name: `extra['rng'][1]` helps where "unsupported global numpy.ndarray" does not.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.torch_files import load_plain

__all__ = ["pack"]

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
    """Turn numbers, strings, containers and tensors into bytes, fixed at this moment.

    Args:
        name: What to call it in an error.
        value: Plain data. Tensors are written from host memory, and of a view only what it shows.

    Returns:
        What `torch.save` makes of it.

    Raises:
        CheckpointError: It, or something in it, could not be loaded again; names which.
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
    """The same with tensors in host memory. Containers are rebuilt, as their tensors change."""
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
    # Of a view, all that it is a view of would be written.
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
