"""Loads a `torch_dist` checkpoint into a sharded run; every rank reads its local rows."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.loading import requests_for
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2_mcore.checkpoint.name_table import Place, StoredNames
from megatron_fsdp_v2_mcore.checkpoint.state_dict import (
    CHUNKS,
    META,
    Translation,
    checkpoint_entries,
)
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import (
    SavedGroups,
    common_state,
    optimizer_problem,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import RELEASE
from megatron_fsdp_v2_mcore.flags.errors import FlagError

STATE = "optimizer.state."
MAIN_WEIGHTS = ("param", "fp32_param")
"""Names of main weights in Megatron's distributed optimizer and in its optimizer for DDP."""

_MAX_LISTED = 6
_OUTPUT_LAYER = ("output_layer.weight", "output_layer.bias")


def load_torch_dist(
    folder: CheckpointFolder, request: dict[str, Any] | None, args: Any
) -> dict[str, Any]:
    """Load a `torch_dist` folder into shards.

    Args:
        folder: The checkpoint.
        request: The state dict that Megatron requests; None if it requests only the arguments and
            the iteration.
        args: Megatron's arguments.

    Returns:
        The state dict, in the format of sharded runs.

    Raises:
        FlagError: The checkpoint lacks a requested entry.
        CheckpointError: The checkpoint is damaged, or contains other objects than plain data.
    """
    return _Loader(folder, common_state(folder)).load(request, args)


class _Loader:
    """Loads one checkpoint."""

    def __init__(self, folder: CheckpointFolder, common: dict[str, Any]) -> None:
        self._folder = folder
        self._common = common
        self._requests: list[ReadRequest] = []
        # Requests of main weights, each with the name of the model weight in the file, and whether
        # this rank counts its elements.
        self._main_weights: list[tuple[str, ReadRequest, bool]] = []
        self._problems: list[str] = []

    def load(self, request: dict[str, Any] | None, args: Any) -> dict[str, Any]:
        """Fill the tensors of a state dict and replace its other values.

        Args:
            request: The state dict that Megatron requests; None if it requests only the arguments
                and the iteration.
            args: Megatron's arguments.

        Raises:
            FlagError: The checkpoint lacks a requested entry.
        """
        common = self._common
        is_release = self._folder.path.name == RELEASE
        if not (args.no_load_optim or args.finetune or is_release):
            problem = optimizer_problem(common)
            if problem:
                raise FlagError(f"{self._folder.path} cannot be resumed from: {problem}")
        result = {key: value for key, value in (request or {}).items() if not key.startswith("_")}
        for key in ("args", "iteration", "checkpoint_version"):
            result[key] = common.get(key)
        result["num_floating_point_operations_so_far"] = common.get(
            "num_floating_point_operations_so_far", 0
        )
        if request is None:
            return result
        if "opt_param_scheduler" in request:
            result["opt_param_scheduler"] = common["opt_param_scheduler"]
        if "rng_state" in request:
            result["rng_state"] = self._rng_state(request["rng_state"], args)
        # A release contains weights only.
        optimizer = None if is_release else request.get("optimizer")
        self._load_tensors(request, args, with_optimizer=optimizer is not None)
        return result

    @torch.no_grad()
    def _load_tensors(self, request: dict[str, Any], args: Any, *, with_optimizer: bool) -> None:
        translation, rules = Translation(request[CHUNKS], request), StoredNames.of(args)
        for name, value in translation.model_entries():
            for key, piece in () if name.is_unused else checkpoint_entries(name, value):
                self._request_weight(rules.place(key), piece, has_optimizer=with_optimizer)
        if with_optimizer:
            self._request_states(translation, rules, args)
        if self._problems:
            problems = listed(sorted(self._problems), _MAX_LISTED)
            others = [p for p in self._problems if not p.startswith(f"it does not contain {STATE}")]
            raise FlagError(
                f"{self._folder.path} is a checkpoint of another model: {problems}"
                f"{'' if others else '; add --no-load-optim to start with a new optimizer'}"
            )
        for entry, count in zip(self._requests, self._folder.fill(self._requests), strict=True):
            if count != entry.target.numel() and not _is_padded(entry.key):
                raise FlagError(
                    f"{self._folder.path} is incomplete: it has {count} of "
                    f"{entry.target.numel()} elements at {entry.offset} of {entry.key}"
                )
        self._correct_main_weights()
        for chunk in translation.chunks:
            for param in chunk.parameters():
                # The values were written to the parameter's memory without a version change.
                torch.autograd.graph.increment_version(param)

    def _request_states(self, translation: Translation, rules: StoredNames, args: Any) -> None:
        """Request the moments, and set steps and options."""
        saved = SavedGroups.of(self._common)
        for part in translation.optimizers():
            for fqn, entry in part["state"].items():
                name = translation.names_by_fqn[fqn]
                if name.is_unused:
                    continue
                for option, value in entry.items():
                    for key, piece in checkpoint_entries(name, value):
                        if isinstance(piece, UnevenDTensor):
                            place = rules.place(key)
                            self._request(f"{STATE}{option}.{place.key}", place, piece)
                if "step" in entry:
                    entry["step"] = torch.full_like(torch.as_tensor(entry["step"]), saved.step)
            part[META] = {fqn: saved.options(fqn, given, args) for fqn, given in part[META].items()}
            if "grad_scaler" in part:
                part["grad_scaler"] = self._grad_scaler() or part["grad_scaler"]

    def _grad_scaler(self) -> dict[str, Any]:
        optimizer = self._common["optimizer"]
        parts = [optimizer, *(p for p in optimizer.values() if isinstance(p, dict))]
        return next((part["grad_scaler"] for part in parts if "grad_scaler" in part), {})

    def _request_weight(self, place: Place, tensor: torch.Tensor, *, has_optimizer: bool) -> None:
        """Request main weights if the checkpoint has them, since they are more precise."""
        is_float = isinstance(tensor, UnevenDTensor) and tensor.dtype == torch.float32
        main_keys = [f"{STATE}{name}.{place.key}" for name in MAIN_WEIGHTS]
        may_have = main_keys if has_optimizer and is_float else []
        found = next((key for key in may_have if key in self._folder.entries), "")
        num_before = len(self._requests)
        self._request(found or place.key, place, tensor)
        if isinstance(tensor, UnevenDTensor) and found and not self._has_quantized_weights():
            is_counted = tensor.owns_replica
            for request in self._requests[num_before:]:
                self._main_weights.append((place.key, request, is_counted))

    def _has_quantized_weights(self) -> bool:
        """Whether model weights were rounded to FP8 or FP4, with scales that are not stored."""
        args = self._common["args"]
        return any(getattr(args, f"{kind}_param_gather", False) for kind in ("fp8", "fp4"))

    def _correct_main_weights(self) -> None:
        """Rebuild main weights from remainders, and replace misplaced ones. Collective.

        Megatron's `fully_reshardable` format may store a main weight at a wrong place, where it
        does not round to the model weight in the file; see docs/checkpoints.md. Remainders belong
        to any model weight, so that this cannot be seen there.
        """
        dtypes = {key: entry.dtype for key, entry in self._folder.tensors()}
        has_remainders = self._has_remainders(dtypes)
        counts: Counter[str] = Counter()
        for key, request, is_counted in self._main_weights:
            main, model = request.target, torch.zeros_like(request.target)
            self._folder.fill([ReadRequest(key, request.offset, model)])
            if has_remainders and dtypes[key] == torch.bfloat16:
                main.copy_(_from_remainders(model, main))
                continue
            rounding = (main - main.to(dtypes[key])).abs()
            # Of two nearest values, either may have been stored. NaN is unequal.
            is_wrong = ~((main - model).abs() <= rounding)
            if number := int(is_wrong.sum()):
                main.copy_(torch.where(is_wrong, model, main))
                counts[key] += number * is_counted
        total = sum(everyones(counts), Counter())
        if total:
            _report(self._folder, total)

    def _has_remainders(self, dtypes: Mapping[str, torch.dtype | None]) -> bool:
        """Return whether main weights of bf16 weights are stored as 16-bit remainders. Collective.

        Transformer Engine's precision-aware Adam keeps them, and the file has them as integers in
        fp32. A checkpoint of main weights may have the arguments of such a run, if it is an export.
        """
        if not getattr(self._common["args"], "use_precision_aware_optimizer", False):
            return False
        found = (r.target for key, r, _ in self._main_weights if dtypes[key] == torch.bfloat16)
        return all(everyones(all(_has_int16_values(target) for target in found)))

    def _request(self, key: str, place: Place, tensor: torch.Tensor) -> None:
        stored, local_shape = self._folder.shape(key), tuple(tensor.shape)
        expected = place.shape(local_shape)
        # The vocabulary, the first dimension, is padded depending on the parallel sizes.
        first = 1 if _is_padded(key) else 0
        if stored is None:
            self._problems.append(f"it does not contain {key}")
        elif len(stored) != len(expected) or stored[first:] != expected[first:]:
            self._problems.append(f"{key} is {stored}, in this run {expected}")
        else:
            for request in requests_for(key, tensor):
                target = request.target[(None,) * len(place.leading)]
                if _is_padded(key):
                    target.zero_()
                offset = place.offset(local_shape, request.offset)
                self._requests.append(ReadRequest(key, offset, target))

    def _rng_state(self, current: dict[str, Any], args: Any) -> dict[str, Any]:
        """Return the saved state of random number generators if the parallel sizes are the same.

        Otherwise, as in Megatron, generators keep the seeds of this run.
        """
        tp = parallel_state.get_tensor_model_parallel_rank()
        pp = parallel_state.get_pipeline_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        key = f"rng_state/shard_{pp}.{tp}_{pp_size}.{tp_size}"
        if key not in self._folder.entries:
            if dist.get_rank() == 0:
                sys.stdout.write(
                    f"{self._folder.path} has no random number state for these parallel sizes: "
                    "generators keep the seeds of this run\n"
                )
            return current
        states = self._folder.object(key)[0]
        dp_size = parallel_state.get_data_parallel_world_size()
        if len(states) < (dp_size if args.data_parallel_random_init else 1):
            return current
        return {f"({pp}, {tp})": states}


def _has_int16_values(tensor: torch.Tensor) -> bool:
    limits = torch.iinfo(torch.int16)
    is_within = (tensor >= limits.min) & (tensor <= limits.max)
    return bool((is_within & (tensor == tensor.round())).all())


def _from_remainders(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 main weights of bf16 weights.

    A remainder is the lower half of a main weight as a signed integer, and the weight is the upper
    half, plus one if the remainder is negative: the bits of the main weight are their sum.

    Args:
        weight: Values of bf16 weights, in fp32.
        remainder: Integers between -2^15 and 2^15 - 1, in fp32, of the same shape.
    """
    return (weight.view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)


def _report(folder: CheckpointFolder, counts: Mapping[str, int]) -> None:
    """Print the parameters whose main weights were replaced, with the numbers of elements."""
    if dist.get_rank() == 0:
        found = [
            f"{key} ({count} of {math.prod(folder.shape(key) or ())} elements)"
            for key, count in sorted(counts.items())
        ]
        sys.stdout.write(
            f"{folder.path}: these main weights do not round to the model weights, which are used "
            f"instead: {listed(found, _MAX_LISTED)}. Their moments are probably wrong as well and "
            "are loaded; see docs/checkpoints.md\n"
        )


def _is_padded(key: str) -> bool:
    return key.endswith(("embedding.word_embeddings.weight", *_OUTPUT_LAYER))
