"""The tensors of the model in a Megatron checkpoint, for `megatron-fsdp-v2 ckpt`.

The core finds this file by the entry-point group `megatron_fsdp_v2.checkpoint_layouts`. Sharded
runs save the sub-tensors of fused layers separately (`model/tensor_shards.py`); here they are
joined into one tensor with the name of Megatron's parameter. Megatron need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_fsdp_v2.checkpoint.entries import MODEL
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import ModelTensor, Piece
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2_mcore.checkpoint.name_table import (
    SUBTENSOR_SUFFIXES,
    StoredNames,
    is_fp8_state,
    split_subtensor_suffix,
    unwrapped,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import is_torch_dist
from megatron_fsdp_v2_mcore.flags.errors import FlagError


def model_tensors(folder: CheckpointFolder) -> Sequence[ModelTensor] | None:
    """Return the tensors of the model in a checkpoint that Megatron saved.

    Returns:
        The tensors; None if Megatron did not save the checkpoint.

    Raises:
        CheckpointError: The checkpoint is incomplete, or the names of its model are unknown.
    """
    if is_torch_dist(folder.path):
        return join_subtensors(_torch_dist_tensors(folder), str(folder.path))
    if not folder.entries.keys() >= {"args", "checkpoint_version"}:
        return None
    whole = (
        ModelTensor.stored(unwrapped(key.removeprefix(MODEL)), Piece(key), entry)
        for key, entry in folder.tensors()
        # FP8 state is not a weight. An export omits it and prints a notice.
        if key.startswith(MODEL) and not is_fp8_state(key)
    )
    return join_subtensors(whole, str(folder.path))


_OTHER_PREFIXES = ("optimizer.", "rng_state/", "rerun_state_machine_state/", "common_state/")


def _torch_dist_tensors(folder: CheckpointFolder) -> Iterator[ModelTensor]:
    """Yield the model's tensors in a `torch_dist` checkpoint, with fused layers in sub-tensors."""
    try:
        # The arguments in such a checkpoint contain instances of Megatron's classes.
        from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import common_state

        rules = StoredNames.of(common_state(folder)["args"])
    except ImportError as error:
        raise CheckpointError(
            f"{folder.path} is a torch_dist checkpoint of Megatron's, and reading it needs "
            f"{error.name}: install this package with its extra, megatron-fsdp-v2[megatron]"
        ) from error
    except FlagError as error:
        raise CheckpointError(str(error)) from error
    for key, entry in folder.tensors():
        is_other = key.startswith(_OTHER_PREFIXES)
        for name, leading in () if is_other else rules.names(key, entry.shape):
            place = rules.place(name)
            # `place` must be the inverse of `names`.
            if (place.key, tuple(position for position, _ in place.leading)) != (key, leading):
                raise CheckpointError(
                    f"{folder.path}: the name of {key} in the model is unknown; load the "
                    "checkpoint into a sharded run and export the checkpoint that the run saves"
                )
            yield ModelTensor.stored(name, Piece(key, leading), entry)


def join_subtensors(found: Iterable[ModelTensor], where: str) -> list[ModelTensor]:
    """Join the sub-tensors of fused layers.

    Args:
        found: Tensors under their names in the checkpoint.
        where: Name of the checkpoint in errors.

    Raises:
        CheckpointError: A sub-tensor is missing, or its shape or dtype does not fit.
    """
    result = []
    pieces: dict[str, dict[str, ModelTensor]] = {}
    for model_tensor in found:
        name, ending = split_subtensor_suffix(model_tensor.tensor.name)
        if ending:
            pieces.setdefault(name, {})[ending] = model_tensor
        else:
            result.append(model_tensor)
    for name, parts in pieces.items():
        order = next((order for order in SUBTENSOR_SUFFIXES if set(order) == set(parts)), None)
        if order is None:
            endings = ", ".join(sorted(parts))
            raise CheckpointError(f"{where} is incomplete: it has only {endings} of {name}")
        result.append(_concatenate(name, [parts[ending] for ending in order], where))
    return result


def _concatenate(name: str, parts: Sequence[ModelTensor], where: str) -> ModelTensor:
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
