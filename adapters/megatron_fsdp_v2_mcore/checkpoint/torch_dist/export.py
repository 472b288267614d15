"""Export of a sharded run's checkpoint to one that Megatron's own DDP and optimizer load.

The export runs in one process without a process group or model, and copies one tensor at a time.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from megatron_fsdp_v2.checkpoint.errors import naming_full_disk
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.writing import Blocks, pickled, write_folder
from megatron_fsdp_v2_mcore.checkpoint.name_table import (
    Place,
    StoredNames,
    is_fp8_state,
    split_subtensor_suffix,
)
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import (
    COMMON,
    FULLY_RESHARDABLE,
    SHARDING_TYPE,
    run_arguments,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import (
    CONFIG,
    TRACKER,
    check_checkpoint_folder,
    find_checkpoint,
    flag_errors,
    is_torch_dist,
    iteration_folder,
)
from megatron_fsdp_v2_mcore.flags.errors import FlagError

MODEL = "model."
STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
META = "param_to_group_meta"

_EXPERT = re.compile(r".*\bmlp\.experts\.(?:local_experts|linear_fc)")
_ATTENTION = re.compile(r"(.*\bself_attention)\.linear_proj")


def export(
    source: str | Path,
    target: str | Path,
    iteration: int | None = None,
    expert_parallel: int | None = None,
) -> Export:
    """Export a checkpoint of a sharded run as a `torch_dist` checkpoint.

    The state of optimizers other than Adam is not exported.

    Args:
        source: The folder to which the run saved.
        target: The folder to pass to `--load`. It may contain other iterations.
        iteration: The iteration; the latest if None.
        expert_parallel: Expert-parallel size of the run that will load the checkpoint, which
            determines whether experts have a separate optimizer; that of the run that saved if
            None.

    Raises:
        FlagError: The checkpoint does not exist or cannot be exported.
    """
    check_checkpoint_folder(source, may_be_empty=False, iteration=iteration)
    found = find_checkpoint(source, iteration)
    assert found is not None
    path, iteration = found
    if is_torch_dist(path):
        raise FlagError(f"{path} is already a torch_dist checkpoint")
    written = iteration_folder(Path(target), iteration)
    if (written / ".metadata").exists():
        raise FlagError(f"{written} already exists; use another folder or remove it")
    with flag_errors(), naming_full_disk(written):
        job = Export(CheckpointFolder(path), written, expert_parallel)
        job.write()
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (written / CONFIG).write_text(json.dumps(config))
    latest = find_checkpoint(target)
    (Path(target) / TRACKER).write_text(str(max(iteration, latest[1] if latest else 0)))
    return job


class Export:
    """The export of one checkpoint.

    Attributes:
        path: The folder that is written.
        num_tensors: Number of copied tensors; weights (per layer and expert), their main weights,
            and their moments count separately.
        num_bytes: Total size of the tensors.
    """

    def __init__(self, folder: CheckpointFolder, target: Path, expert_parallel: int | None) -> None:
        self._folder = folder
        self.num_tensors = self.num_bytes = 0
        self._non_tensors = self._read_non_tensors()
        self._args = run_arguments(self._non_tensors, folder.path)
        optimizer = self._non_tensors.get("optimizer", {})
        self._options: dict[str, dict[str, Any]] = optimizer.get(META, {})
        self._names = StoredNames.of(self._args)
        self._expert_parallel = expert_parallel or self._args.expert_model_parallel_size
        # Optimizers other than Adam have other wrappers in Megatron, with other checkpoint entries.
        self._has_optimizer = bool(self._options) and self.omitted_optimizer is None
        self.path = target
        self._written: dict[str, Any] = {}

    def write(self) -> None:
        """Write the checkpoint."""
        # The steps that may fail run before the long ones.
        rng_states = self._non_tensors.get("rng_state", {})
        has_rng = all(str(rank) in rng_states for rank in self._model_parallel_ranks())
        common = self._common_state(has_rng=has_rng)
        modules: dict[str, Place] = {}
        for key in self._names_of_tensors(MODEL):
            name = key.removeprefix(MODEL)
            place = self._names.place(name)
            self._write_weight(name, place)
            module = _module_place(self._names.place(split_subtensor_suffix(name)[0]))
            modules[f"{module.key}/{module.leading}"] = module
        if getattr(self._args, "hybrid_layer_pattern", None):
            # A hybrid model requests the extra state of its output layer even if it has no weight.
            modules.setdefault("output_layer/()", Place("output_layer", ()))
        for module in modules.values():
            self._write_extra_state(module)
        if has_rng:
            self._write_rng_states()
        self._add_object(COMMON, common)
        write_folder(self.path, self._written, has_manifest=False)

    def _write_weight(self, name: str, place: Place) -> None:
        options = self._options.get(split_subtensor_suffix(name)[0])
        dtype = None if options is None else self._args.params_dtype
        self._add_tensor(place.key, place, MODEL + name, dtype)
        has_state = options is not None and f"{STATE}{name}.{MOMENTS[0]}" in self._folder.entries
        if has_state and self._has_optimizer:
            self._add_tensor(f"{STATE}param.{place.key}", place, MODEL + name, torch.float32)
            for moment in MOMENTS:
                self._add_tensor(f"{STATE}{moment}.{place.key}", place, f"{STATE}{name}.{moment}")

    def _add_tensor(
        self, key: str, place: Place, source: str, dtype: torch.dtype | None = None
    ) -> None:
        """Add a tensor to the blocks to write, at its place and converted to a dtype."""
        entry = self._folder.entries[source]
        shape, dtype = entry.shape, dtype or entry.dtype
        assert dtype is not None
        sizes = (*(1 for _ in place.leading), *shape)

        def read() -> torch.Tensor:
            data: torch.Tensor = self._folder.read_tensor(source)
            return data.to(dtype).view(sizes)

        whole = Blocks(place.shape(shape), dtype)
        blocks = self._written.setdefault(key, whole)
        if (blocks.shape, blocks.dtype) != (whole.shape, whole.dtype):
            raise FlagError(f"{source} and other tensors of {key} differ in shape or dtype")
        blocks.add(place.offset(shape), sizes, read)
        self.num_tensors += 1
        self.num_bytes += math.prod(shape) * dtype.itemsize

    def _add_object(self, key: str, value: Any) -> None:
        self._written[key] = pickled([value])

    def _names_of_tensors(self, prefix: str) -> Iterator[str]:
        for key, _ in self._folder.tensors():
            if key.startswith(prefix) and not is_fp8_state(key):
                yield key

    def _read_non_tensors(self) -> dict[str, Any]:
        """Read all entries that are not tensors of the model or optimizer, as nested as saved."""
        entries = self._folder.entries
        flat = {
            key: self._folder.object(key)
            for key, entry in entries.items()
            if entry.path and entry.dtype is None and not key.startswith((MODEL, STATE))
        }
        flat |= {
            key: self._folder.read_tensor(key)
            for key in self._names_of_tensors("rng_state.")
            if entries[key].path
        }
        paths: dict[str, Any] = {key: entries[key].path for key in flat}
        nested: dict[str, Any] = unflatten_state_dict(flat, paths)
        return nested

    @property
    def omitted_optimizer(self) -> str | None:
        """Name of the optimizer if its state is not exported."""
        name = getattr(self._args, "optimizer", "adam")
        return None if name == "adam" or not self._options else str(name)

    def _write_extra_state(self, module: Place) -> None:
        """Write the empty extra state that all of Megatron's layers request."""
        leading = module.leading or ((0, 1),)
        index = ".".join(str(position) for position, _ in leading)
        shape = ".".join(str(length) for _, length in leading)
        keys = [f"{module.key}._extra_state"]
        if match := _ATTENTION.fullmatch(module.key):
            keys.append(f"{match[1]}.core_attention._extra_state")
        for key in keys:
            self._add_object(f"{key}/shard_{index}_{shape}", None)

    def _model_parallel_ranks(self) -> list[tuple[int, int]]:
        """Return the pipeline and tensor-parallel ranks of the run that saved."""
        pp, tp = self._args.pipeline_model_parallel_size, self._args.tensor_model_parallel_size
        return [(p, t) for p in range(pp) for t in range(tp)]

    def _write_rng_states(self) -> None:
        sizes = tuple(size + 1 for size in self._model_parallel_ranks()[-1])
        for p, t in self._model_parallel_ranks():
            key = f"rng_state/shard_{p}.{t}_{sizes[0]}.{sizes[1]}"
            self._add_object(key, self._non_tensors["rng_state"][str((p, t))])

    def _common_state(self, *, has_rng: bool) -> dict[str, Any]:
        args = copy.copy(self._args)
        args.ckpt_format = "torch_dist"
        args.use_megatron_fsdp = args.use_fsdp_fully_shard_api = False
        args.dist_ckpt_optim_fully_reshardable = True
        args.async_save = False
        args.no_save_rng = not has_rng
        args.no_save_optim = not self._has_optimizer
        common = {
            "args": args,
            "checkpoint_version": self._non_tensors.get("checkpoint_version", 3.0),
            "iteration": self._non_tensors["iteration"],
            "num_floating_point_operations_so_far": self._non_tensors.get(
                "num_floating_point_operations_so_far", 0
            ),
            "content_metadata": {
                SHARDING_TYPE: FULLY_RESHARDABLE,
                "distrib_optim_fully_reshardable_mem_efficient": False,
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        }
        if "opt_param_scheduler" in self._non_tensors:
            common["opt_param_scheduler"] = self._non_tensors["opt_param_scheduler"]
        if self._has_optimizer:
            common["optimizer"] = self._optimizer_options()
        return common

    def _optimizer_options(self) -> dict[Any, Any]:
        """Return the options of the optimizer, or of both optimizers if experts have their own."""
        groups: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        step = self._num_steps()
        for name, options in self._options.items():
            is_separate = self._expert_parallel > 1 and _EXPERT.match(name) is not None
            group = {k: v for k, v in options.items() if k != "params"}
            group |= {"is_expert_parallel": is_separate, "step": step}
            if not any(_has_same_identifiers(group, other) for other in groups[is_separate]):
                groups[is_separate].append(group)
        scaler = self._non_tensors["optimizer"].get("grad_scaler")
        parts = [
            {"optimizer": {"param_groups": part}, "param_state_sharding_type": FULLY_RESHARDABLE}
            | ({"grad_scaler": scaler} if scaler else {})
            for part in groups.values()
            if part
        ]
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    def _num_steps(self) -> int:
        """Return the number of steps of the optimizer.

        Raises:
            FlagError: The numbers differ between parameters, which Megatron does not support.
        """
        steps = {int(o["step"]) for o in self._options.values() if o.get("step") is not None}
        for key, entry in self._folder.entries.items():
            if key.startswith(STATE) and key.endswith(".step"):
                read = self._folder.object if entry.dtype is None else self._folder.read_tensor
                steps.add(int(read(key)))
        if len(steps) > 1:
            raise FlagError(
                f"{self._folder.path} has parameters that were stepped {sorted(steps)} times; "
                "torch_dist stores one number for all parameters"
            )
        return steps.pop() if steps else 0


def _module_place(place: Place) -> Place:
    """Return the module of a weight."""
    key = re.sub(r"\.(?:layer_norm_)?(?:weight|bias)\d*$", "", place.key)
    return Place(key if key != place.key else place.key.rpartition(".")[0], place.leading)


def _has_same_identifiers(group: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(group.get(key) == other.get(key) for key in param_group_identifier_keys)
