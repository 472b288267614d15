"""accelerate: FSDP2 of a configuration (`fsdp_version: 2`) shards with this package.

    import megatron_fsdp_v2_for.accelerate

    megatron_fsdp_v2_for.accelerate.install(sharding_strategy="optim_grads_params")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Call it before `prepare`. The rest of a script does not change, nor does its configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed.fsdp
from torch import nn

from megatron_fsdp_v2 import UnitOptions
from megatron_fsdp_v2_for.adapter import Adapter, with_options
from megatron_fsdp_v2_patching import Patch, Patches

__all__ = ["PATCHES", "install", "uninstall"]

_HERE = "megatron_fsdp_v2_for.accelerate"
_GIVEN = ("mesh", "mp_policy", "offload_policy", "reshard_after_forward", "ignored_params")
PATCHES = {
    "1.15": (
        Patch(
            "accelerate.accelerator:fsdp2_prepare_model",
            reason="accelerate imports FSDP2's function in the body of this one",
            wrap=f"{_HERE}:shards_here",
            parameters=("accelerator", "model"),
        ),
        Patch(
            "accelerate.utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy",
            reason="accelerate's policy by size selects containers, and modules around later units",
            wrap=f"{_HERE}:selects_units",
            parameters=("fsdp2_plugin", "model"),
        ),
        Patch(
            "accelerate.accelerator:Accelerator.prepare",
            reason="accelerate replicates or uses FSDP1 in some configurations without a message",
            wrap=f"{_HERE}:rejects_others",
            parameters=("self",),
        ),
    ),
}
"""Patches by version of accelerate."""

_ADAPTER = Adapter("accelerate", PATCHES)
install, uninstall = _ADAPTER.install, _ADAPTER.uninstall


def shards_here(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that shards a prepared model, which does so with this package.

    Raises:
        ValueError: An option is one that accelerate gives from its configuration.
    """
    for name in _GIVEN:
        if name in options:
            raise ValueError(
                f"accelerate sets {name} of fully_shard from its own configuration "
                "(FullyShardedDataParallelPlugin, ParallelismConfig); set it there, and do not "
                "pass it to install()"
            )

    def prepare(accelerator: Any, model: Any) -> Any:
        given = dict(options)
        if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            # accelerate moves the model to the meta device, and fills it after it is sharded.
            unit = given.get("options") or UnitOptions()
            if unit.param_init_fn is None:
                allocate = functools.partial(_allocate, accelerator.device)
                given["options"] = dataclasses.replace(unit, param_init_fn=allocate)
        patches, name = Patches(), "fully_shard"
        patches.set(
            torch.distributed.fsdp, name, with_options(torch.distributed.fsdp.fully_shard, given)
        )
        try:
            return original(accelerator, model)
        finally:
            patches.undo()

    return prepare


def _allocate(device: torch.device, module: nn.Module) -> None:
    module.to_empty(device=device, recurse=False)


def selects_units(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that makes a policy, which then selects only modules that can be units.

    The policy by size also selects containers, and modules around the embeddings, which accelerate
    makes units later; inner units come first.
    """

    def make(fsdp2_plugin: Any, model: Any) -> Any:
        policy = original(fsdp2_plugin, model)
        if policy is None:
            return None
        getters = (f"get_{side}put_embeddings" for side in ("in", "out"))
        own = [getattr(model, getter, lambda: None)() for getter in getters]

        def selects(module: nn.Module) -> bool:
            # The same classes as in the policy of `torch.distributed.fsdp.wrap`.
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not policy(module):
                return False
            inside = {*module.modules()} - {module}
            return not any(embedding in inside for embedding in own)

        return selects

    return make


def rejects_others(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `Accelerator.prepare`, which rejects a request for FSDP that is not FSDP2."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        # accelerate sets this variable for a plugin that a script passes, too.
        is_asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if is_asked and not self.is_fsdp2:
            plugin = self.state.fsdp_plugin if self.distributed_type == "FSDP" else None
            found = (
                f"fsdp_version is {plugin.fsdp_version}; set fsdp_version: 2"
                if plugin is not None
                else f"its distributed_type is {self.distributed_type.value} on the device type "
                f"{self.device.type}; accelerate shards on accelerators only"
            )
            raise RuntimeError(
                "accelerate was asked for FSDP, which megatron_fsdp_v2_for.accelerate runs as "
                f"FSDP2, but {found}. To train without it, call uninstall()"
            )
        return original(self, *args, **kwargs)

    return prepare
