"""Megatron's `fsdp_dtensor` state dicts under the names and in the pieces of the whole model.

Megatron's own are in terms of a rank: layers counted from the stage's first, one dictionary per
virtual stage, the parts of fused layers in the order of ranks. What is written and read here is in
terms of the model, so that any number of ranks of any kind can read what any other wrote. What
Megatron goes on with after loading is in its own terms again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2_mcore.checkpoint import fp8_state
from megatron_fsdp_v2_mcore.checkpoint.fit import Verdict, compare_with_file
from megatron_fsdp_v2_mcore.checkpoint.names import (
    CanonicalName,
    canonical_names,
    canonical_parameter_names,
    unwrapped,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import reject_gpt_layers

__all__ = ["load_by_model", "save_by_model", "with_chunks"]

CHUNKS = "_chunks_of_megatron_fsdp_v2"
"""Entry of a state dict under construction: the model chunks it was made from."""

MODEL = "model."
META = "param_to_group_meta"


def with_chunks(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Add the model chunks to Megatron's `generate_state_dict`, for `save_by_model` to name."""

    def generate(args: Any, model: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        state_dict = original(args, model, *rest, **kwargs)
        chunks = list(model)
        if any(isinstance(param, UnevenDTensor) for c in chunks for param in c.parameters()):
            state_dict[CHUNKS] = chunks
        return state_dict

    return generate


def save_by_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's preparation of a state dict for torch's distributed checkpoint."""

    def preprocess(args: Any, raw_state_dict: dict[str, Any], model: Any) -> Any:
        state_dict = raw_state_dict.copy()
        chunks = state_dict.pop(CHUNKS, None)
        if chunks is not None:
            return _Translation(chunks, state_dict).for_saving()
        if any(isinstance(value, UnevenDTensor) for value in state_dict["model"].values()):
            # What `load_by_model` asks for is translated already.
            return state_dict
        return original(args, raw_state_dict, model)

    return preprocess


def load_by_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have Megatron's `_load_base_checkpoint` ask for what the whole model is made of. Collective.

    Before, everything asked for is compared with what is in the file; after, what Megatron goes on
    with is put back, filled.
    """

    def load(
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        chunks = None if sharded_state_dict is None else sharded_state_dict.pop(CHUNKS, None)
        if sharded_state_dict is None or chunks is None:
            return original(load_dir, args, rank0, sharded_state_dict, **kwargs)
        reject_gpt_layers(load_dir, kwargs.get("gpt_compat_layer_maps"))
        saved, path, _, _ = original(load_dir, args, rank0=True)
        if saved is None:
            return original(load_dir, args, rank0, sharded_state_dict, **kwargs)
        request = _Request(_Translation(chunks, sharded_state_dict))
        request.settle(path, saved.get("args"), args)
        loaded, *rest = original(load_dir, args, rank0, request.state_dict, **kwargs)
        return (request.restored(loaded), *rest)

    return load


class _Translation:
    """A state dict of Megatron's and what its entries are called in the whole model."""

    def __init__(self, chunks: Sequence[nn.Module], raw: dict[str, Any]) -> None:
        self.raw = raw
        self.chunks = chunks
        self.chunk_keys = (
            ["model"] if len(chunks) == 1 else [f"model{i}" for i, _ in enumerate(chunks)]
        )
        self._names = canonical_names(chunks)
        by_param = canonical_parameter_names(chunks)
        self.of_param = {name.fqn: name for name in by_param.values()}
        self.scales: dict[str, torch.Tensor] = {}
        self._written_here = {name.fqn for param, name in by_param.items() if _is_first(param)}

    def name(self, chunk: int, local: str) -> CanonicalName:
        """What an entry of a chunk's state dict is called."""
        return self._names[chunk].get(local) or CanonicalName(unwrapped(local))

    def optimizers(self) -> list[dict[str, Any]]:
        """State dicts of the optimizers, of which a chain has several."""
        state = self.raw.get("optimizer")
        if state is None:
            return []
        return [state] if "state" in state else list(state.values())

    def for_saving(self) -> dict[str, Any]:
        """What this rank writes: everything it is the first to hold."""
        rest = self._rest()
        model = {
            key: value
            for name, value in self._model_entries()
            if not (name.is_copy or name.is_unused)
            for key, value in _pieces(name, value)
        }
        model.update(fp8_state.saved_tensors(self.chunks, _is_first))
        result = {**rest, "model": model}
        if "optimizer" in self.raw:
            result["optimizer"] = self.optimizer_entries(self._saves)
        return result

    def for_loading(self) -> dict[str, Any]:
        """What this rank reads: everything it holds."""
        fp8_state.allocate(self.chunks)
        self.scales = fp8_state.wanted_tensors(self.chunks)
        model = {
            key: value
            for name, value in self._model_entries()
            if not name.is_unused
            for key, value in _pieces(name, value)
        }
        model.update(self.scales)
        result = {**self._rest(), "model": model}
        if "optimizer" in self.raw:
            result["optimizer"] = self.optimizer_entries(lambda name, value: not name.is_unused)
        return result

    def optimizer_entries(self, keeps: Callable[[CanonicalName, Any], bool]) -> dict[str, Any]:
        """One state dict for all optimizers.

        Args:
            keeps: Whether an entry of a parameter is to be in it.
        """
        merged: dict[str, Any] = {"state": {}, META: {}}
        for part in self.optimizers():
            for fqn, entry in part["state"].items():
                name = self.of_param[fqn]
                for option, value in entry.items():
                    if keeps(name, value):
                        for key, piece in _pieces(name, value):
                            merged["state"].setdefault(key, {})[option] = piece
            for fqn, meta in part[META].items():
                if keeps(self.of_param[fqn], meta):
                    merged[META][fqn] = dict(meta)
            for key, value in part.items():
                if key not in ("state", META):
                    merged.setdefault(key, value)
        return merged

    def _saves(self, name: CanonicalName, value: Any) -> bool:
        if name.is_copy or name.is_unused:
            return False
        # Every rank has its own rows; of what they all have, thousands need not write the same.
        return isinstance(value, UnevenDTensor) or name.fqn in self._written_here

    def _rest(self) -> dict[str, Any]:
        return {k: v for k, v in self.raw.items() if k not in (*self.chunk_keys, "optimizer")}

    def _model_entries(self) -> Iterator[tuple[CanonicalName, Any]]:
        for chunk, key in enumerate(self.chunk_keys):
            for local, value in self.raw[key].items():
                # What Transformer Engine calls its extra state is in bytes that are of this rank,
                # and would have to be unpickled: what counts of it is saved as tensors.
                if not local.endswith("_extra_state"):
                    yield self.name(chunk, local), value


class _Request:
    """What is read from a file, and what becomes of it."""

    def __init__(self, translation: _Translation) -> None:
        self._translation = translation
        self._verdict = Verdict()
        self.state_dict = translation.for_loading()

    def settle(self, path: str, saved_args: Any, args: Any) -> None:
        """Find out whether the file has what is asked for, and ask no more than that. Collective.

        Raises:
            FlagError: The file is of another model; on all ranks alike.
        """
        request = {key: value for key, value in self.state_dict.items() if key != "_model"}
        verdict = compare_with_file(path, request, saved_args, args)
        self._verdict = verdict
        if dist.get_rank() == 0 and verdict.notes:
            sys.stdout.write("".join(f"{note}\n" for note in verdict.notes))
        for key in verdict.without_scales:
            name = key.removeprefix(MODEL)
            self.state_dict["model"].pop(name, None)
            self._translation.scales.pop(name, None)
        if not verdict.loads_rng:
            self.state_dict.pop("rng_state", None)
        optimizer = self.state_dict.get("optimizer")
        if optimizer is None:
            return
        if not verdict.loads_grad_scaler:
            optimizer.pop("grad_scaler", None)
        for key in verdict.without_state:
            optimizer["state"].pop(key, None)

    def restored(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """The state dict Megatron goes on with: its own names, what was read in them."""
        raw = self._translation.raw
        fp8_state.restore(self._translation.chunks, self._translation.scales)
        result = {k: v for k, v in loaded.items() if k not in ("model", "optimizer")}
        result.update({key: raw[key] for key in self._translation.chunk_keys})
        if "rng_state" in raw and "rng_state" not in result:
            result["rng_state"] = raw["rng_state"]
        if "optimizer" in raw:
            for part in self._translation.optimizers():
                self._fill(part)
            result["optimizer"] = raw["optimizer"]
        return result

    def _fill(self, part: dict[str, Any]) -> None:
        """Put what is not a tensor into an optimizer's state dict; tensors were read in place."""
        read = self.state_dict["optimizer"]
        names = self._translation.of_param
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
        part[META] = {fqn: read[META][fqn] for fqn in part[META] if not names[fqn].is_unused}
        if "grad_scaler" in part and "grad_scaler" in read:
            part["grad_scaler"] = read["grad_scaler"]


def _pieces(name: CanonicalName, value: Any) -> list[tuple[str, Any]]:
    """Entries of a checkpoint for one of a state dict: a tensor of several pieces has several."""
    if not name.pieces:
        return [(name.fqn, value)]
    if not isinstance(value, UnevenDTensor):
        return [(key, value) for key in name.keys]
    pieces = value.pieces()
    if len(pieces) != len(name.pieces):
        raise RuntimeError(
            f"{name.fqn} is called {' and '.join(name.keys)} in a checkpoint, but consists of "
            f"{len(pieces)} pieces"
        )
    return list(zip(name.keys, pieces, strict=True))


def _is_first(param: nn.Parameter) -> bool:
    if not isinstance(param, UnevenDTensor):
        return True
    first, last = param.local_rows
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None or first or first == last:
        return False
    # Of tensor-parallel ranks the first one as well, whatever it holds.
    return param.owns_replica and not any(coordinate[len(param.row_shards.strides) :])
