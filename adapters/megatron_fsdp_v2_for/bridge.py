"""Megatron-Bridge: `ddp.use_megatron_fsdp` shards with this package.

    import megatron_fsdp_v2_for.bridge

    megatron_fsdp_v2_for.bridge.install(sharding_strategy="optim_grads_params")
    pretrain(config, forward_step)

Checkpoints of the format `fsdp_dtensor` are those of `megatron_fsdp_v2_mcore`: they load at other
parallel sizes. Weights of Hugging Face load into a sharded model, and are exported from one.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import megatron_fsdp_v2_mcore
from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, whole_of
from megatron_fsdp_v2.runtime.module import make_idle
from megatron_fsdp_v2_for.adapter import Adapter
from megatron_fsdp_v2_mcore.flags.checkpoint_check import find_checkpoint, is_torch_dist
from megatron_fsdp_v2_mcore.flags.options import active_options
from megatron_fsdp_v2_mcore.flags.settings import reject
from megatron_fsdp_v2_patching import Patch

__all__ = ["PATCHES", "install", "uninstall"]

_AS_MEGATRON = "Megatron-Bridge reads attributes of Megatron's FSDP, whose row order differs"


def _patch(target: str, reason: str, wrap: str, parameters: str) -> Patch:
    wrap = wrap if ":" in wrap else f"megatron_fsdp_v2_for.bridge:{wrap}"
    return Patch(f"megatron.{target}", reason, wrap=wrap, parameters=tuple(parameters.split()))


PATCHES = {
    "0.6": (
        _patch(
            "training.models.dist_utils:FullyShardedDataParallel",
            "the class in which model builders wrap model chunks",
            "with_strategy",
            "config ddp_config module",
        ),
        _patch(
            "bridge.training.config:ConfigContainer.validate",
            "options that sharded parameters do not support are rejected by name",
            "with_checks",
            "self",
        ),
        _patch(
            "bridge.training.train:calc_params_l2_norm",
            "Megatron-Bridge sums squares of DTensors over their meshes only",
            "megatron_fsdp_v2_mcore.optim.optimizer:params_l2_norm",
            "model",
        ),
        _patch(
            "bridge.training.train:check_param_hashes_across_dp_replicas",
            "Megatron compares the local values of a parameter, and ranks hold different rows",
            "megatron_fsdp_v2_mcore.model.weight_hashes:compare_replicas",
            "model cross_check",
        ),
        _patch(
            "bridge.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
            "Megatron splits fused layers by attributes of its own buffers, and names saved values "
            "by the layer and stage numbers local to a rank",
            "megatron_fsdp_v2_mcore.checkpoint.state_dict:save_by_global_names",
            "cfg raw_state_dict model",
        ),
        _patch(
            "bridge.training.checkpointing:generate_state_dict",
            "the function above receives only the first model chunk of a rank, and needs all",
            "megatron_fsdp_v2_mcore.checkpoint.state_dict:with_chunks",
            "ckpt_cfg model",
        ),
        _patch(
            "bridge.training.checkpointing:_load_base_checkpoint",
            "Megatron-Bridge does not compare a checkpoint with the model",
            "load_by_global_names",
            "load_dir ckpt_cfg rank0 sharded_state_dict",
        ),
        _patch(
            "bridge.models.conversion.model_bridge:MegatronModelBridge.load_weights_hf_to_megatron",
            _AS_MEGATRON,
            "into_own_rows",
            "self hf_pretrained megatron_model",
        ),
        _patch(
            "bridge.models.conversion.model_bridge:MegatronModelBridge._broadcast_shared_embeddings",
            "a tied embedding is broadcast to the last pipeline stage as a plain tensor",
            "to_tied_embedding",
            "self megatron_model",
        ),
        _patch(
            "bridge.models.conversion.param_mapping:AutoMapping._detect_parallelism_type",
            "Megatron-Bridge finds the kind of a layer by the name of its class",
            "by_unsharded_class",
            "self module",
        ),
        _patch(
            "bridge.models.conversion.param_mapping:_module_uses_fsdp",
            _AS_MEGATRON,
            "unless_sharded",
            "megatron_module",
        ),
        _patch(
            "bridge.models.conversion.peft_bridge:MegatronPeftBridge.materialize_adapter_weights",
            "Megatron-Bridge gathers weights for an export, except those of adapters",
            "with_gathered_adapters",
            "self adapter_tasks",
        ),
        _patch(
            "core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor:uneven_dtensor_to_full_tensor",
            _AS_MEGATRON,
            "to_tensor_parallel_part",
            "dtensor",
        ),
    ),
}
"""Patches by version of Megatron-Bridge; `install()` applies those of `megatron.core` too."""

_ADAPTER = Adapter("megatron-bridge", PATCHES)


def install(sharding_strategy: str | None = None, **options: Any) -> None:
    """Make Megatron-Bridge shard with this package, in place of an earlier installation.

    Call it before `pretrain` or before a model is built. Models whose configuration does not set
    `ddp.use_megatron_fsdp` are built and trained as before.

    Args:
        sharding_strategy: Replaces `ddp.data_parallel_sharding_strategy`. None: the value there.
        options: Fields of `megatron_fsdp_v2_mcore.Options`.

    Raises:
        RuntimeError: See `Adapter.install`; for Megatron-Core too.
    """
    selected = megatron_fsdp_v2_mcore.Options(**options)
    _ADAPTER.install(sharding_strategy)
    try:
        megatron_fsdp_v2_mcore.enable(selected)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Remove the patches of `install()`. Sharded models do not change."""
    _ADAPTER.uninstall()
    megatron_fsdp_v2_mcore.uninstall()


def with_strategy(original: type, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that wraps a chunk with this package, with the strategy of `install()`."""
    wrapper = megatron_fsdp_v2_mcore.FullyShardedDataParallel

    def wrap(config: Any, ddp_config: Any, module: Any, **kwargs: Any) -> Any:
        for name, layer in module.named_modules():
            _reject_expert_adapter(name, layer, config)
            _mark_magnitude(name, layer, config)
            _gather_in_adapters(layer)
        _forget_initial_values(module)
        if options["sharding_strategy"] is not None:
            ddp_config.data_parallel_sharding_strategy = options["sharding_strategy"]
        return wrapper(config, ddp_config, module, options=active_options(), **kwargs)

    return wrap


def _reject_expert_adapter(name: str, adapter: Any, config: Any) -> None:
    """Reject an adapter of grouped experts whose ranks would train or save different weights."""
    if not (getattr(adapter, "is_expert", False) and hasattr(adapter, "linear_in")):
        return
    if config.expert_model_parallel_size > 1 or (config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            f"{name}: adapters of experts cannot be sharded with expert parallelism; leave the "
            "experts out of target_modules, such as '*.self_attention.linear_qkv'"
        )
    if adapter.linear_in.weight._backward_hooks or adapter.linear_out.weight._backward_hooks:
        raise ValueError(
            f"{name}: one adapter for all experts of a layer sums gradients in hooks that sharded "
            "parameters do not call; set share_expert_adapters=False"
        )


def _mark_magnitude(name: str, layer: torch.nn.Module, config: Any) -> None:
    """Mark DoRA's magnitudes of a column-parallel layer as tensor-parallel.

    Raises:
        ValueError: The layer is row-parallel: each rank has the norms of its own columns, so that
            the outputs of tensor-parallel ranks differ.
    """
    adapter: Any = getattr(layer, "adapter", None)
    magnitude = getattr(adapter, "weight_magnitude", None)
    if magnitude is None or config.tensor_model_parallel_size == 1:
        return
    if adapter.input_is_parallel:
        raise ValueError(
            f"{name}: with tensor parallelism, DoRA of Megatron-Bridge divides a row-parallel "
            "layer by norms of a part of its columns; leave linear_proj and linear_fc2 out of "
            "target_modules"
        )
    if adapter.base_linear_is_parallel:
        # Megatron has marked every parameter that its own layers do not mark as replicated.
        for attribute, value in ("tensor_model_parallel", True), ("partition_dim", 0):
            setattr(magnitude, attribute, value)


def _gather_in_adapters(layer: torch.nn.Module) -> None:
    """Gather a norm's output for sequence parallelism in the adapters, not in the wrapped layer.

    Transformer Engine 2.20 drops the gradient of an output that it has gathered.
    """
    base: Any = getattr(layer, "to_wrap", None)
    if getattr(base, "return_layernorm_output_gathered", False):
        base.return_layernorm_output_gathered = False
        adapters: Iterable[Any] = layer.get_submodule("adapter").modules()
        for adapter in adapters:
            if hasattr(adapter, "disable_sequence_parallel_comm"):
                adapter.disable_sequence_parallel_comm = False


def _forget_initial_values(module: torch.nn.Module) -> None:
    """Forget initial values that quantized weights keep for main weights, if loaded since."""
    params: Iterable[Any] = module.parameters()
    for param in params:
        kept = getattr(param, "get_high_precision_init_val", lambda: None)()
        if kept is None:
            continue
        initial = kept.to(param.device).float()
        size, largest = initial.abs(), initial.abs().max()
        if "FP4" in type(param).__name__:
            rounding = largest / 4
        else:
            # Twice the error of rounding to 3 bits of mantissa, and of the smallest numbers. One
            # scale for all elements is 1 at first with delayed scaling.
            scale = getattr(param, "_scale_inv", largest * 2**-8)
            rounding = size / 8 + scale.max() * 2**-9
        if bool(((param.dequantize().float() - initial).abs() > rounding).any()):
            param.clear_high_precision_init_val()


def with_checks(original: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    """Return the validation of a configuration, which also rejects unsupported options."""

    def validate(self: Any) -> None:
        original(self)
        if self.ddp.use_megatron_fsdp:
            reject(self.checkpoint)
            if self.checkpoint.async_save:
                raise ValueError(
                    "CheckpointConfig.async_save = True cannot be used with sharded parameters: "
                    "processes of NVIDIA's resiliency extension write into the final folder"
                )
            for name in ("non_persistent_ckpt_type", "non_persistent_save_interval"):
                if (value := getattr(self.checkpoint, name)) is not None:
                    raise ValueError(
                        f"CheckpointConfig.{name} = {value!r} cannot be used with sharded "
                        "parameters: Megatron-Bridge makes non-persistent checkpoints of its own "
                        "sharded tensors; leave it out"
                    )
            model = getattr(self.model, "transformer", self.model)
            for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
                if getattr(model, name, None) is not None:
                    raise ValueError(
                        f"{name} cannot be used with sharded parameters: Megatron-Bridge reorders "
                        "rows of a checkpoint by attributes of Megatron's buffers; leave it out"
                    )
            _check_pretrained(self)

    return validate


def _check_pretrained(config: Any) -> None:
    """Check that the initial weights can be loaded into shards."""
    utils = importlib.import_module("megatron.bridge.training.utils.checkpoint_utils")
    folder = config.checkpoint.pretrained_checkpoint
    if folder is None or utils.is_hf_checkpoint_dir(folder):
        return
    if config.peft is not None:
        problem = "its weights are loaded before adapters are added and parameters are sharded"
    elif is_torch_dist(found[0] if (found := find_checkpoint(folder)) else Path(folder)):
        problem = "it was saved as torch_dist"
    elif config.checkpoint.ckpt_format != "fsdp_dtensor":
        raise ValueError(
            f"set CheckpointConfig.ckpt_format to 'fsdp_dtensor', the format of {folder}"
        )
    else:
        return
    raise ValueError(
        f"CheckpointConfig.pretrained_checkpoint = {folder!r} cannot be used with sharded "
        f"parameters: {problem}; export it with AutoBridge, and give the folder of Hugging Face"
    )


def load_by_global_names(original: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the function that loads a state dict, which loads those of sharded chunks by name."""

    def load(
        load_dir: Any,
        ckpt_cfg: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        **kwargs: Any,
    ) -> Any:
        def read(load_dir: Any, args: Any, *rest: Any, **named: Any) -> Any:
            return original(load_dir, ckpt_cfg, *rest, **named, **kwargs)

        # Megatron's arguments have the options of the schedule too.
        args = SimpleNamespace(**{**vars(ckpt_cfg), **vars(kwargs["cfg"].scheduler)})
        state_dict = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.state_dict")
        return state_dict.load_by_global_names(read, load_dir, args, rank0, sharded_state_dict)

    return load


def into_own_rows(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that imports weights of Hugging Face into the rows of this rank."""

    def load(self: Any, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        for chunk in chunks:
            make_idle(chunk)
        sharded = _sharded(chunks)
        if not sharded:
            return original(self, hf_pretrained, megatron_model, *args, **kwargs)
        for param in sharded:
            (first, last), row = param.local_rows, math.prod(param.part_shape[1:])
            # The import reads these attributes, which parameters of Megatron's FSDP have.
            vars(param)["orig_param"] = torch.empty(param.part_shape, device="meta")
            vars(param)["megatron_fsdp_slice"] = slice(first * row, last * row)
        # Without the wrapper, the import calls no method of Megatron's FSDP at its end.
        unwrap = importlib.import_module("megatron.core.utils").unwrap_model
        original(self, hf_pretrained, unwrap(chunks), *args, **kwargs)
        return chunks

    return load


def to_tied_embedding(original: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the function that copies a tied embedding to the last pipeline stage."""

    def synchronize(self: Any, megatron_model: Any) -> None:
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        if not _sharded(chunks):
            original(self, megatron_model)
            return
        units = importlib.import_module("megatron_fsdp_v2_mcore.model.units")
        groups = importlib.import_module("megatron.bridge.training.utils.pg_utils")
        for chunk in chunks:
            units.synchronize_embeddings(chunk, groups.get_pg_collection(chunks))

    return synchronize


def _sharded(chunks: Iterable[torch.nn.Module]) -> list[ShardedRows]:
    """Return the parameters of model chunks that this package has sharded."""
    params: Iterator[Any] = (param for chunk in chunks for param in chunk.parameters())
    return [param for param in params if isinstance(param, ShardedRows)]


def by_unsharded_class(original: Callable[..., str], options: Mapping[str, Any]) -> Any:
    """Return the function that finds the kind of a layer, for sharded layers too."""

    def detect(self: Any, module: Any) -> str:
        if isinstance(module, FSDPModule):
            # The same layer under the class that it had before it was sharded.
            unsharded: Any = object.__new__(type(module).__bases__[1])
            unsharded.__dict__ = module.__dict__
            module = unsharded
        return original(self, module)

    return detect


def unless_sharded(original: Callable[[Any], bool], options: Mapping[str, Any]) -> Any:
    """Return whether a module has whole weights over tensor-parallel ranks: not with this package.

    Megatron-Bridge then gathers them, in the order of rows of Megatron's own layers.
    """

    def uses_fsdp(megatron_module: Any) -> bool:
        params = getattr(megatron_module, "_parameters", {}).values()
        return not any(isinstance(p, ShardedRows) for p in params) and original(megatron_module)

    return uses_fsdp


def to_tensor_parallel_part(original: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the function that gathers a DTensor: over data-parallel ranks only."""

    def gather(dtensor: Any) -> Any:
        return _part(dtensor) if isinstance(dtensor, ShardedRows) else original(dtensor)

    return gather


def with_gathered_adapters(original: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the function that exports the weights of adapters, which gathers them first."""

    def gathered(task: Any) -> Any:
        weight = task.param_weight
        is_sharded = isinstance(weight, ShardedRows)
        return dataclasses.replace(task, param_weight=_part(weight)) if is_sharded else task

    def materialize(self: Any, adapter_tasks: Iterable[Any]) -> Any:
        return original(
            self,
            [
                dataclasses.replace(
                    task,
                    linear_in_task=gathered(task.linear_in_task),
                    linear_out_task=gathered(task.linear_out_task),
                )
                for task in adapter_tasks
            ],
        )

    return materialize


def _part(param: ShardedRows) -> torch.Tensor:
    """Gather this tensor-parallel rank's part of a parameter. Collective over the other axes."""
    shards, mesh = param.row_shards, param.device_mesh
    strides = (*shards.strides, *(0,) * (mesh.ndim - len(shards.strides)))
    part = dataclasses.replace(shards, strides=strides, tensor=None)
    local = param.to_local().detach()
    return whole_of(ShardedRows.from_rows(local, mesh, part, param.part_shape))
