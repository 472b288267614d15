"""Megatron's `fsdp_dtensor` state dicts under global names, with separate sub-tensors.

Megatron's own state dicts are local to a rank: layers are numbered from the first of the stage,
each virtual stage has a dictionary, and fused layers are concatenated in the order of ranks. The
saved state dicts are independent of the parallel sizes, so that runs of all sizes can read them.
After loading, values are returned to Megatron under its local names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_fsdp_v2.checkpoint.errors import NotPlainError, all_ranks_or_raise
from megatron_fsdp_v2.checkpoint.foreign import load_object
from megatron_fsdp_v2.checkpoint.writing import pickled
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2_mcore.checkpoint import fp8_state
from megatron_fsdp_v2_mcore.checkpoint.compatibility import compare_with_file
from megatron_fsdp_v2_mcore.checkpoint.group_options import restored_options
from megatron_fsdp_v2_mcore.checkpoint.name_table import unwrapped
from megatron_fsdp_v2_mcore.checkpoint.names import (
    CanonicalName,
    canonical_names,
    canonical_parameter_names,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import reject_gpt_layers
from megatron_fsdp_v2_mcore.flags.options import active_options
from megatron_fsdp_v2_mcore.model.replicas import check_before_save

CHUNKS = "_chunks_of_megatron_fsdp_v2"
"""Temporary entry of a state dict: the model chunks from which it was built."""

META = "param_to_group_meta"


def with_chunks(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Add the model chunks to the result of `generate_state_dict`, for `save_by_global_names`."""

    def generate(args: Any, model: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        state_dict = original(args, model, *rest, **kwargs)
        chunks = list(model)
        if any(isinstance(param, UnevenDTensor) for c in chunks for param in c.parameters()):
            state_dict[CHUNKS] = chunks
        return state_dict

    return generate


def save_by_global_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's preparation of a state dict for torch's distributed checkpoint."""

    def preprocess(args: Any, raw_state_dict: dict[str, Any], model: Any) -> Any:
        state_dict = raw_state_dict.copy()
        chunks = state_dict.pop(CHUNKS, None)
        if chunks is not None:
            check_before_save(
                chunks,
                parallel_state.get_embedding_group(check_initialized=False),
                may_differ=active_options().saves_differing_replicas,
            )
            _check_arguments(state_dict.get("args"))
            return Translation(chunks, state_dict).for_saving()
        if any(isinstance(value, UnevenDTensor) for value in state_dict["model"].values()):
            # The request of `load_by_global_names` is already translated.
            return state_dict
        return original(args, raw_state_dict, model)

    return preprocess


def _check_arguments(args: Any) -> None:
    """Print a notice if loads will refuse the arguments, which the user's script may extend."""
    if dist.get_rank() == 0:
        try:
            load_object(pickled(args), "Megatron's arguments")
        except NotPlainError as error:
            sys.stdout.write(
                f"{error}; a run that loads this checkpoint needs --fsdp-trust-checkpoint, unless "
                "its script allows the class with torch.serialization.add_safe_globals\n"
            )


def load_by_global_names(
    original: Callable[..., Any],
    load_dir: Any,
    args: Any,
    rank0: bool,
    sharded_state_dict: dict[str, Any] | None,
    **kwargs: Any,
) -> Any:
    """Load the values of chunks by global names. Collective.

    Before loading, the request is compared with the contents of the file. After loading, the state
    dict is returned under Megatron's local names.

    Args:
        original: The function that reads, with the arguments and results of Megatron's
            `_load_base_checkpoint`.
        load_dir: Argument of the function.
        args: Argument of the function.
        rank0: Argument of the function.
        sharded_state_dict: Argument of the function.
        **kwargs: Other arguments of the function.
    """
    chunks = None if sharded_state_dict is None else sharded_state_dict.pop(CHUNKS, None)
    if sharded_state_dict is None or chunks is None:
        return original(load_dir, args, rank0, sharded_state_dict, **kwargs)
    reject_gpt_layers(load_dir, kwargs.get("gpt_compat_layer_maps"))
    saved, path, _, _ = original(load_dir, args, rank0=True)
    if saved is None:
        return original(load_dir, args, rank0, sharded_state_dict, **kwargs)
    translation = Translation(chunks, sharded_state_dict)
    request = translation.for_loading()
    _remove_missing(request, path, saved.get("args"), args)
    loaded, *rest = original(load_dir, args, rank0, request, **kwargs)
    return (_to_local_names(translation, request, loaded, args), *rest)


def fill_by_global_names(
    state_dict: dict[str, Any], args: Any, fill: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Fill a state dict of sharded chunks from values by global names. Collective.

    Args:
        state_dict: The request of Megatron's `load_checkpoint`, with the chunks.
        args: Megatron's arguments.
        fill: Fills the tensors of a request by global names, and replaces its other values.

    Returns:
        The loaded state dict under Megatron's local names.
    """
    translation = Translation(state_dict.pop(CHUNKS), state_dict)
    request = translation.for_loading()
    fill(request)
    return _to_local_names(translation, request, request, args)


class Translation:
    """A state dict of Megatron and the global names of its entries."""

    def __init__(self, chunks: Sequence[nn.Module], raw: dict[str, Any]) -> None:
        self.raw = raw
        self.chunks = chunks
        numbered = [f"model{i}" for i, _ in enumerate(chunks)]
        self.chunk_keys = ["model"] if len(chunks) == 1 else numbered
        self._names = canonical_names(chunks)
        by_param = canonical_parameter_names(chunks)
        self.names_by_fqn = {name.fqn: name for name in by_param.values()}
        self.scales: dict[str, torch.Tensor] = {}
        self._written = {name.fqn for param, name in by_param.items() if _writes_replicated(param)}

    def name(self, chunk: int, local: str) -> CanonicalName:
        """Return the global name of an entry of a chunk's state dict."""
        return self._names[chunk].get(local) or CanonicalName(unwrapped(local))

    def optimizers(self) -> list[dict[str, Any]]:
        """Return the state dicts of the optimizers; a chain has several."""
        state = self.raw.get("optimizer")
        if state is None:
            return []
        return [state] if "state" in state else list(state.values())

    def for_saving(self) -> dict[str, Any]:
        """Return the entries that this rank saves, without copies and unused parameters."""
        scales = fp8_state.tensors_to_save(self.chunks, _writes_replicated)
        return self._entries(
            scales, lambda name: not (name.is_copy or name.is_unused), self._writes_state
        )

    def for_local_saving(self) -> dict[str, Any]:
        """Return the entries that this rank will load itself, replicated values included."""
        scales = fp8_state.tensors_to_save(self.chunks, lambda param: True)
        return self._entries(
            scales, lambda name: not name.is_unused, lambda name, _: not name.is_unused
        )

    def for_loading(self) -> dict[str, Any]:
        """Return the entries that this rank loads: all entries that it uses."""
        fp8_state.allocate(self.chunks)
        self.scales = fp8_state.tensors_to_load(self.chunks)
        return self._entries(
            self.scales, lambda name: not name.is_unused, lambda name, _: not name.is_unused
        )

    def _entries(
        self,
        scales: dict[str, torch.Tensor],
        keeps: Callable[[CanonicalName], bool],
        keeps_state: Callable[[CanonicalName, Any], bool],
    ) -> dict[str, Any]:
        """Return all entries, with those of the model and the optimizer under global names."""
        # A run that does not load a value, such as random number state, requests None.
        given = {k: v for k, v in self.raw.items() if v is not None}
        result = {k: v for k, v in given.items() if k not in self.chunk_keys}
        result["model"] = {
            key: piece
            for name, value in self.model_entries()
            if keeps(name)
            for key, piece in checkpoint_entries(name, value)
        } | scales
        if "optimizer" in result:
            result["optimizer"] = self.optimizer_entries(keeps_state)
        return result

    def optimizer_entries(self, keeps: Callable[[CanonicalName, Any], bool]) -> dict[str, Any]:
        """Merge the state dicts of all optimizers into one.

        Args:
            keeps: Whether the result contains an entry of a parameter.
        """
        merged: dict[str, Any] = {"state": {}, META: {}}
        for part in self.optimizers():
            for fqn, entry in part["state"].items():
                name = self.names_by_fqn[fqn]
                for option, value in entry.items():
                    if keeps(name, value):
                        for key, piece in checkpoint_entries(name, value):
                            merged["state"].setdefault(key, {})[option] = piece
            for fqn, meta in part[META].items():
                if keeps(self.names_by_fqn[fqn], meta):
                    merged[META][fqn] = dict(meta)
            for key, value in part.items():
                if key not in ("state", META):
                    merged.setdefault(key, value)
        return merged

    def _writes_state(self, name: CanonicalName, value: Any) -> bool:
        if name.is_copy or name.is_unused:
            return False
        # Every rank writes its own rows. Only one rank writes a replicated value.
        return isinstance(value, UnevenDTensor) or name.fqn in self._written

    def model_entries(self) -> Iterator[tuple[CanonicalName, Any]]:
        """Yield the global names and values of the chunks' parameters and buffers."""
        for chunk, key in enumerate(self.chunk_keys):
            for local, value in self.raw[key].items():
                # Transformer Engine's extra state is local to a rank and must be unpickled. Its
                # FP8 state is saved as tensors instead.
                if not local.endswith("_extra_state"):
                    yield self.name(chunk, local), value


def _remove_missing(request: dict[str, Any], path: str, saved: Any, args: Any) -> None:
    """Check a request against the file and remove the values that the file lacks. Collective.

    Raises:
        FlagError: The file is of another model. Raised on all ranks.
    """
    entries = {key: value for key, value in request.items() if key != "_model"}
    result = compare_with_file(path, entries, saved, args)
    if dist.get_rank() == 0 and result.notes:
        sys.stdout.write("".join(f"{note}\n" for note in result.notes))
    for *outer, key in result.absent:
        values = request
        for name in outer:
            values = values.get(name, {})
        values.pop(key, None)


def _to_local_names(
    translation: Translation, request: dict[str, Any], loaded: dict[str, Any], args: Any
) -> dict[str, Any]:
    """Return the loaded values in Megatron's state dict, under its local names. Collective."""
    raw = translation.raw
    scales = {key: value for key, value in translation.scales.items() if key in request["model"]}
    fp8_state.restore(translation.chunks, scales)
    result = {k: v for k, v in loaded.items() if k not in ("model", "optimizer")}
    result.update({key: raw[key] for key in translation.chunk_keys})
    if "rng_state" in raw:
        result.setdefault("rng_state", raw["rng_state"])
    if "optimizer" in raw:
        all_ranks_or_raise(
            "resume its optimizer",
            lambda: _copy_plain_values(translation, request["optimizer"], args),
        )
        result["optimizer"] = raw["optimizer"]
    return result


def _copy_plain_values(translation: Translation, read: dict[str, Any], args: Any) -> None:
    """Copy non-tensor values to the optimizers' state dicts; tensors were read in place."""
    names = translation.names_by_fqn
    for part in translation.optimizers():
        for fqn in list(part["state"]):
            if names[fqn].is_unused:
                continue
            found = read["state"].get(names[fqn].keys[0])
            if found is None:
                del part["state"][fqn]
                continue
            for option, value in found.items():
                if not hasattr(value, "shape"):
                    part["state"][fqn][option] = value
        part[META] = {
            fqn: restored_options(fqn, given, read[META][fqn], args)
            for fqn, given in part[META].items()
            if not names[fqn].is_unused
        }
        if "grad_scaler" in part and "grad_scaler" in read:
            part["grad_scaler"] = read["grad_scaler"]


def checkpoint_entries(name: CanonicalName, value: Any) -> list[tuple[str, Any]]:
    """Return the checkpoint entries of one value: a fused tensor has one per sub-tensor."""
    if not name.pieces:
        return [(name.fqn, value)]
    if not isinstance(value, UnevenDTensor):
        return [(key, value) for key in name.keys]
    pieces = value.pieces()
    if len(pieces) != len(name.pieces):
        raise RuntimeError(
            f"{name.fqn} has the names {' and '.join(name.keys)} in a checkpoint, but has "
            f"{len(pieces)} sub-tensors"
        )
    return list(zip(name.keys, pieces, strict=True))


def _writes_replicated(param: nn.Parameter) -> bool:
    if not isinstance(param, UnevenDTensor):
        return True
    first, last = param.local_rows
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None or first or first == last:
        return False
    # Only the first tensor-parallel rank writes, for sharded and replicated parameters.
    return param.owns_replica and not any(coordinate[len(param.row_shards.strides) :])


def set_value(nested: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Replace one value in nested dictionaries and lists. Keys in the path are strings."""
    for key in path[:-1]:
        nested = nested[_key(nested, key)]
    nested[_key(nested, path[-1])] = value


def _key(nested: Any, name: str | int) -> Any:
    if name in nested or not isinstance(nested, Mapping):
        return name
    return next(key for key in nested if str(key) == name)
