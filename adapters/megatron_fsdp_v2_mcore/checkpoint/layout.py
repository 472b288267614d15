"""The tensors of the model in a Megatron checkpoint, for `megatron-fsdp-v2 ckpt`.

The core finds it by the entry-point group `megatron_fsdp_v2.checkpoint_layouts`. Sharded runs save
the sub-tensors of fused layers one by one (`model/tensor_shards.py`); here they become one tensor
again, under the name that it has in Megatron's module. This does not need Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.model_tensors import MODEL, ModelTensor, Piece
from megatron_fsdp_v2.checkpoint.plain_tensors import PlainTensor
from megatron_fsdp_v2_mcore.checkpoint.fp8_names import is_fp8_state
from megatron_fsdp_v2_mcore.flags.checkpoint_check import is_torch_dist

__all__ = ["ORDERS", "joined", "model_tensors"]

ORDERS = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"))
"""What names of pieces end in, in their order: of gated layers, and of state-space ones."""

_PIECE = re.compile(r"(.*[._](?:weight|bias)\d*)(_[wv]|\.(?:z|x|B|C|dt))")
_WRAPPERS = re.compile(r"(?:module\.)*")


def model_tensors(folder: CheckpointFolder) -> Sequence[ModelTensor] | None:
    """Say what the model of a checkpoint that Megatron saved consists of.

    Returns:
        None where it is not one of Megatron's.

    Raises:
        CheckpointError: It is one, and not whole, or of a model whose names are not known.
    """
    if is_torch_dist(folder.path):
        # The arguments in such a checkpoint are made of Megatron's classes.
        try:
            from megatron_fsdp_v2_mcore.checkpoint.torch_dist import plain_names
        except ImportError as error:
            raise CheckpointError(
                f"{folder.path} is a torch_dist checkpoint of Megatron's, and reading it needs "
                f"{error.name}: install this package with its extra, megatron-fsdp-v2[megatron]"
            ) from error
        return joined(plain_names.model_tensors(folder), str(folder.path))
    if not (folder.has("args") and folder.has("checkpoint_version")):
        return None
    whole = []
    for key, entry in folder.tensors():
        # What FP8 is quantized with is not a weight: an export leaves it out, and says so.
        if key.startswith(MODEL) and not is_fp8_state(key):
            name = _WRAPPERS.sub("", key.removeprefix(MODEL), count=1)
            shape = tuple(entry.size)
            piece = Piece(key, (0,) * len(shape), shape)
            tensor = PlainTensor(name, shape, entry.properties.dtype)
            whole.append(ModelTensor(tensor, (piece,)))
    return joined(whole, str(folder.path))


def joined(found: Iterable[ModelTensor], where: str) -> list[ModelTensor]:
    """Put the pieces of fused layers together.

    Args:
        found: Tensors under the names they are saved as.
        where: What to call the checkpoint in an error.

    Raises:
        CheckpointError: A piece is missing.
    """
    result = []
    pieces: dict[str, dict[str, ModelTensor]] = {}
    for model_tensor in found:
        match = _PIECE.fullmatch(model_tensor.tensor.name)
        if match is None:
            result.append(model_tensor)
        else:
            pieces.setdefault(match[1], {})[match[2]] = model_tensor
    for name, parts in pieces.items():
        order = next((order for order in ORDERS if set(order) == set(parts)), None)
        if order is None:
            endings = ", ".join(sorted(parts))
            raise CheckpointError(f"{where} is incomplete: of {name} it holds {endings} only")
        result.append(_join(name, [parts[ending] for ending in order], where))
    return result


def _join(name: str, parts: Sequence[ModelTensor], where: str) -> ModelTensor:
    first = parts[0].tensor
    for part in parts:
        if part.tensor.shape[1:] != first.shape[1:] or part.tensor.dtype != first.dtype:
            raise CheckpointError(
                f"{where}: {first.name} and {part.tensor.name} do not belong to one tensor: "
                f"{first.shape} of {first.dtype}, {part.tensor.shape} of {part.tensor.dtype}"
            )
    rows = sum(part.tensor.shape[0] for part in parts)
    whole = replace(first, name=name, shape=(rows, *first.shape[1:]))
    return ModelTensor(whole, tuple(piece for part in parts for piece in part.pieces))
