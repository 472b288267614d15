"""The tensors of the model in a Megatron checkpoint, for `megatron-fsdp-v2 ckpt`.

The core finds this file by the entry-point group `megatron_fsdp_v2.checkpoint_layouts`. Sharded
runs save the sub-tensors of fused layers separately (`model/tensor_shards.py`); here they are
joined into one tensor with the name of Megatron's parameter. Megatron need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_fsdp_v2.checkpoint.entries import MODEL
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import Piece, Pieces
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


def model_tensors(folder: CheckpointFolder) -> Pieces | None:
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
        (unwrapped(key.removeprefix(MODEL)), Piece(key))
        for key, _ in folder.tensors()
        # FP8 state is not a weight. An export omits it and prints a notice.
        if key.startswith(MODEL) and not is_fp8_state(key)
    )
    return join_subtensors(whole, str(folder.path))


_OTHER_PREFIXES = ("optimizer.", "rng_state/", "rerun_state_machine_state/", "common_state/")


def _torch_dist_tensors(folder: CheckpointFolder) -> Iterator[tuple[str, Piece]]:
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
            yield name, Piece(key, leading)


def join_subtensors(found: Iterable[tuple[str, Piece]], where: str) -> Pieces:
    """Join the sub-tensors of fused layers.

    Args:
        found: Tensors under their names in the checkpoint.
        where: Name of the checkpoint in errors.

    Raises:
        CheckpointError: A sub-tensor is missing.
    """
    result: dict[str, list[Piece]] = {}
    fused: dict[str, dict[str, Piece]] = {}
    for full_name, piece in found:
        name, ending = split_subtensor_suffix(full_name)
        if ending:
            fused.setdefault(name, {})[ending] = piece
        else:
            result[name] = [piece]
    for name, parts in fused.items():
        order = next((order for order in SUBTENSOR_SUFFIXES if set(order) == set(parts)), None)
        if order is None:
            endings = ", ".join(sorted(parts))
            raise CheckpointError(f"{where} is incomplete: it has only {endings} of {name}")
        result[name] = [parts[ending] for ending in order]
    return result
