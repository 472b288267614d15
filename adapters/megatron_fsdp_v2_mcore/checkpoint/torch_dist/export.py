"""From a checkpoint of a sharded run to one that Megatron's own DDP and optimizer load.

One process, no process group, no model: tensors go from file to file one at a time.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2._text import readable_size
from megatron_fsdp_v2.checkpoint.errors import naming_full_disk
from megatron_fsdp_v2.checkpoint.writing import FolderWriter
from megatron_fsdp_v2_mcore.checkpoint.fp8_names import is_fp8_state
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.common import (
    COMMON,
    FULLY_RESHARDABLE,
    SHARDING_TYPE,
)
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.names import Place, StoredNames
from megatron_fsdp_v2_mcore.flags.checkpoint_check import (
    CONFIG,
    TRACKER,
    check_checkpoint_folder,
    find_checkpoint,
    is_torch_dist,
    iteration_folder,
)
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = ["export", "to_torch_dist"]

MODEL = "model."
STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
META = "param_to_group_meta"

_EXPERT = re.compile(r".*\bmlp\.experts\.(?:local_experts|linear_fc)")
_PIECE = re.compile(r"(.*[._](?:weight|bias)\d*)(?:_[wv]|\.(?:z|x|B|C|dt))")
_ATTENTION = re.compile(r"(.*\bself_attention)\.linear_proj")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        path: The folder of the iteration.
        num_tensors: Tensors of it: a weight of one layer and expert, a main weight, a moment.
        num_bytes: Their size.
        largest: Bytes of the largest of them: what was in memory at a time.
        left_out: The optimizer whose state was not exported, if it is such a one.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    largest: int
    left_out: str | None = None


def export(
    source: str | Path,
    target: str | Path,
    iteration: int | None = None,
    expert_parallel: int | None = None,
) -> Exported:
    """Make a `torch_dist` checkpoint of one of a sharded run.

    The state of other optimizers than Adam is left out.

    Args:
        source: What the run saved to.
        target: What to name with `--load`; may hold other iterations.
        iteration: Which one; the latest when None.
        expert_parallel: Expert-parallel size of the run that will load it, which decides whether
            experts have an optimizer of their own; that of the run that saved when None.

    Raises:
        FlagError: There is no such checkpoint, or it cannot be exported.
    """
    check_checkpoint_folder(source, may_be_empty=False, iteration=iteration)
    found = find_checkpoint(source, iteration)
    if found is None:
        raise FlagError(f"{source} has no checkpoint")
    path, iteration = found
    if is_torch_dist(path):
        raise FlagError(f"{path} is a torch_dist checkpoint already")
    written = iteration_folder(Path(target), iteration)
    if (written / ".metadata").exists():
        raise FlagError(f"{written} is there already; name another folder or remove it")
    job = _Export(MegatronFolder(path), written, expert_parallel)
    with naming_full_disk(written):
        job.write()
    (written / CONFIG).write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    latest = find_checkpoint(target)
    (Path(target) / TRACKER).write_text(str(max(iteration, latest[1] if latest else 0)))
    return Exported(written, job.num_tensors, job.num_bytes, job.largest, job.left_out)


class _Export:
    """One checkpoint on its way."""

    def __init__(self, folder: MegatronFolder, target: Path, expert_parallel: int | None) -> None:
        self._folder = folder
        self.num_tensors = self.num_bytes = self.largest = 0
        self._plain = self._objects()
        if not isinstance(self._plain.get("args"), argparse.Namespace):
            raise FlagError(f"{folder.path} holds no arguments of a Megatron run")
        self._args = self._plain["args"]
        self._names = StoredNames.of(self._args)
        self._expert_parallel = expert_parallel or self._args.expert_model_parallel_size
        # Megatron's other optimizers have wrappers, and parts of a checkpoint, of their own.
        self._has_optimizer = bool(self._options()) and self.left_out is None
        self._writer = FolderWriter(target, has_manifest=False)

    def write(self) -> None:
        """Write everything."""
        # First what can go wrong, then what takes long.
        has_rng = all(str(rank) in self._plain.get("rng_state", {}) for rank in self._ranks())
        common = self._common(has_rng=has_rng)
        modules: dict[str, Place] = {}
        for key in self._tensors(MODEL):
            name = key.removeprefix(MODEL)
            place = self._names.place(name)
            self._write_weight(name, place)
            module = _module(self._names.place(_whole(name)))
            modules[f"{module.key}/{module.front}"] = module
        if getattr(self._args, "hybrid_layer_pattern", None):
            # A hybrid model asks for that of its output layer also where it has no weight of its
            # own.
            modules.setdefault("output_layer/()", Place("output_layer", ()))
        for module in modules.values():
            self._write_extra_state(module)
        if has_rng:
            self._write_rng_states()
        self._writer.add_object(COMMON, [common])
        self._writer.finish()

    def _write_weight(self, name: str, place: Place) -> None:
        options = self._options().get(_whole(name))
        has_state = options is not None and self._folder.has(f"{STATE}{name}.{MOMENTS[0]}")
        main = self._folder.read_tensor(MODEL + name)
        dtype = main.dtype if options is None else self._args.params_dtype
        self._put(place.key, place, main.to(dtype))
        if not (has_state and self._has_optimizer):
            return
        self._put(f"{STATE}param.{place.key}", place, main.float())
        del main
        for moment in MOMENTS:
            self._put(
                f"{STATE}{moment}.{place.key}",
                place,
                self._folder.read_tensor(f"{STATE}{name}.{moment}"),
            )

    def _put(self, key: str, place: Place, data: torch.Tensor) -> None:
        own = tuple(data.shape)
        block = data.view(*(1 for _ in place.front), *own)
        self._writer.add_block(key, place.shape(own), place.offset(own), block)
        self.num_tensors += 1
        self.num_bytes += data.nbytes
        self.largest = max(self.largest, data.nbytes)

    def _tensors(self, prefix: str) -> Iterator[str]:
        for key, entry in self._folder.metadata.state_dict_metadata.items():
            if (
                key.startswith(prefix)
                and isinstance(entry, TensorStorageMetadata)
                and not is_fp8_state(key)
            ):
                yield key

    def _objects(self) -> dict[str, Any]:
        """Everything that is not a tensor of the model or its optimizer, nested as it was saved."""
        paths = self._folder.metadata.planner_data or {}
        flat = {
            key: self._folder.object(key)
            for key, entry in self._folder.metadata.state_dict_metadata.items()
            if key in paths
            and not isinstance(entry, TensorStorageMetadata)
            and not key.startswith((MODEL, STATE))
        }
        flat |= {
            key: self._folder.read_tensor(key)
            for key in self._tensors("rng_state.")
            if key in paths
        }
        nested: dict[str, Any] = unflatten_state_dict(flat, {key: paths[key] for key in flat})
        return nested

    @property
    def left_out(self) -> str | None:
        """The optimizer whose state is not exported, if it is such a one."""
        name = getattr(self._args, "optimizer", "adam")
        return None if name == "adam" or not self._options() else str(name)

    def _options(self) -> dict[str, dict[str, Any]]:
        options: dict[str, dict[str, Any]] = self._plain.get("optimizer", {}).get(META, {})
        return options

    def _write_extra_state(self, module: Place) -> None:
        """Empty: what layers keep besides weights, which all of Megatron's layers ask for."""
        front = module.front or ((0, 1),)
        index = ".".join(str(position) for position, _ in front)
        shape = ".".join(str(length) for _, length in front)
        keys = [f"{module.key}._extra_state"]
        match = _ATTENTION.fullmatch(module.key)
        if match is not None:
            keys.append(f"{match[1]}.core_attention._extra_state")
        for key in keys:
            self._writer.add_object(f"{key}/shard_{index}_{shape}", [None])

    def _ranks(self) -> list[tuple[int, int]]:
        """Pipeline and tensor-parallel ranks of the run that saved."""
        pp, tp = self._args.pipeline_model_parallel_size, self._args.tensor_model_parallel_size
        return [(p, t) for p in range(pp) for t in range(tp)]

    def _write_rng_states(self) -> None:
        sizes = tuple(size + 1 for size in self._ranks()[-1])
        for p, t in self._ranks():
            key = f"rng_state/shard_{p}.{t}_{sizes[0]}.{sizes[1]}"
            self._writer.add_object(key, [self._plain["rng_state"][str((p, t))]])

    def _common(self, *, has_rng: bool) -> dict[str, Any]:
        args = copy.copy(self._args)
        args.ckpt_format = "torch_dist"
        args.use_megatron_fsdp = args.use_fsdp_fully_shard_api = False
        args.dist_ckpt_optim_fully_reshardable = True
        args.async_save = False
        args.no_save_rng = not has_rng
        args.no_save_optim = not self._has_optimizer
        common = {
            "args": args,
            "checkpoint_version": self._plain.get("checkpoint_version", 3.0),
            "iteration": self._plain["iteration"],
            "num_floating_point_operations_so_far": self._plain.get(
                "num_floating_point_operations_so_far", 0
            ),
            "content_metadata": {
                SHARDING_TYPE: FULLY_RESHARDABLE,
                "distrib_optim_fully_reshardable_mem_efficient": False,
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        }
        if "opt_param_scheduler" in self._plain:
            common["opt_param_scheduler"] = self._plain["opt_param_scheduler"]
        if self._has_optimizer:
            common["optimizer"] = self._optimizers()
        return common

    def _optimizers(self) -> dict[Any, Any]:
        """Options of the optimizer; of two, where experts have one of their own."""
        groups: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        step = self._step()
        for name, options in self._options().items():
            is_apart = self._expert_parallel > 1 and _EXPERT.match(name) is not None
            group = {k: v for k, v in options.items() if k != "params"}
            group |= {"is_expert_parallel": is_apart, "step": step}
            if not any(_is_same(group, other) for other in groups[is_apart]):
                groups[is_apart].append(group)
        scaler = self._plain["optimizer"].get("grad_scaler")
        parts = [
            {"optimizer": {"param_groups": part}, "param_state_sharding_type": FULLY_RESHARDABLE}
            | ({"grad_scaler": scaler} if scaler else {})
            for part in groups.values()
            if part
        ]
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    def _step(self) -> int:
        """How many steps the optimizer made.

        Raises:
            FlagError: Parameters made different numbers of them, which Megatron has no place for.
        """
        steps = {int(o["step"]) for o in self._options().values() if o.get("step") is not None}
        for key, entry in self._folder.metadata.state_dict_metadata.items():
            if key.startswith(STATE) and key.endswith(".step"):
                is_tensor = isinstance(entry, TensorStorageMetadata)
                steps.add(
                    int(self._folder.read_tensor(key) if is_tensor else self._folder.object(key))
                )
        if len(steps) > 1:
            raise FlagError(
                f"{self._folder.path} has parameters that were stepped {sorted(steps)} times; "
                "torch_dist keeps one number for all"
            )
        return steps.pop() if steps else 0


def _module(place: Place) -> Place:
    """The module a weight belongs to."""
    key = re.sub(r"\.(?:layer_norm_)?(?:weight|bias)\d*$", "", place.key)
    return Place(key if key != place.key else place.key.rpartition(".")[0], place.front)


def _whole(name: str) -> str:
    """Name of the parameter a piece is of."""
    match = _PIECE.fullmatch(name)
    return name if match is None else match[1]


def _is_same(group: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(group.get(key) == other.get(key) for key in param_group_identifier_keys)


class _TorchDist:
    """`megatron-fsdp-v2 ckpt convert --to torch_dist`; see `Converter`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this format."""
        parser.description = (
            "Turn a checkpoint of a sharded run into one that Megatron's own optimizer loads: "
            "source is what the run saved to, with --save; target what to name with --load, with "
            "--ckpt-format torch_dist."
        )
        parser.add_argument("--iteration", type=int, help="default: the latest")
        parser.add_argument(
            "--expert-model-parallel-size",
            type=int,
            help="of the run that will load it; default: that of the run that saved",
        )

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        """Export; return 2 with one sentence on standard error where that cannot be done."""
        try:
            done = export(source, target, args.iteration, args.expert_model_parallel_size)
        except FlagError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        sys.stdout.write(
            f"{done.path}: {done.num_tensors} tensors, {readable_size(done.num_bytes)}, one at a "
            f"time (the largest has {readable_size(done.largest)})\n"
        )
        if done.left_out is not None:
            sys.stdout.write(
                f"the state of --optimizer {done.left_out} is not exported: load it with "
                "--no-load-optim or --finetune\n"
            )
        return 0


to_torch_dist = _TorchDist()
