"""Initialization of parameters on the meta device, with the values of a build with memory.

Megatron initializes parameters during construction, with one random number generator per kind of
parameter. The order in which units are materialized differs from the order of construction.
Parameters that share a generator can therefore not be initialized when their unit is materialized:

* Position embeddings, routers and gates of shared experts are built and initialized in fp32 in
  host memory, with torch's CPU generator on every device. The parameters of a chunk are initialized
  together, in the order of construction, and copied when their unit is materialized.
* Grouped experts use the generator of experts, which no other parameter uses. Their layers are
  materialized in order.
* Layers of Transformer Engine use the generator of tensor-parallel weights. An output layer uses
  the same generator, and is initialized first because it has memory from the start. On stages with
  an output layer, the values of these layers therefore differ from those of a build with memory.

Vocabulary embeddings and Megatron's own parallel layers pass an explicit device and are never on
the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.utils import log_single_rank
from torch import nn

from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

INITIAL_VALUES_WARNING = (
    "--init-model-with-meta-device: weights of Transformer Engine's layers are initialized after "
    "those of an output layer; on pipeline stages with an output layer, their initial values "
    "differ from those without the flag and have the same distribution"
)
"""Warning at startup if initial weights may differ from those of a build with memory."""

_logger = logging.getLogger(__name__)


def initializer(config: Any, chunk: nn.Module) -> Callable[[nn.Module], None]:
    """Return a function that initializes a module's own parameters once they have memory.

    Megatron's own FSDP calls `reset_parameters()`, which initializes a plain embedding with torch's
    unit normal and not with the configured method.

    Args:
        config: The transformer configuration.
        chunk: The model chunk, on the meta device or with memory.
    """
    host_values = _initialize_on_host(config, chunk)
    if any(_is_initialized_after_output_layer(module) for module in chunk.modules()):
        log_single_rank(_logger, logging.WARNING, INITIAL_VALUES_WARNING)

    def initialize(module: nn.Module) -> None:
        values = host_values.pop(module, None)
        if values is not None:
            for name, value in values.items():
                module.get_parameter(name).copy_(value)
            return
        own = list(module.parameters(recurse=False))
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{type(module).__name__} has parameters or buffers on the meta device and no "
                "reset_parameters() to give them values; leave out --init-model-with-meta-device"
            )
        tracker = get_cuda_rng_tracker()
        # Sharded parameters need different values on each rank, replicated ones equal values.
        if any(is_expert(param) for param in own):
            with tracker.fork(get_expert_parallel_rng_tracker_name()):
                reset()
        elif any(getattr(param, "tensor_model_parallel", False) for param in own):
            with tracker.fork():
                reset()
        else:
            reset()

    return initialize


def _initialize_on_host(config: Any, chunk: nn.Module) -> dict[nn.Module, dict[str, torch.Tensor]]:
    """Initialize the parameters that Megatron builds on the host, in the order of construction."""
    found = {}
    for module in chunk.modules():
        if not isinstance(module, nn.Embedding | Router | SharedExpertMLP):
            continue
        meta_params = {
            name: p for name, p in module._parameters.items() if p is not None and p.is_meta
        }
        if not meta_params:
            continue
        # A build with memory initializes them in fp32, for every compute dtype.
        for name, param in meta_params.items():
            empty = torch.empty(param.shape, dtype=torch.float32, device="cpu")
            module._parameters[name] = nn.Parameter(empty)
        try:
            with torch.no_grad():
                _initialize_module(config, module)
            found[module] = {name: module.get_parameter(name).detach() for name in meta_params}
        finally:
            module._parameters.update(meta_params)
    return found


def _initialize_module(config: Any, module: Any) -> None:
    if isinstance(module, SharedExpertMLP):
        # The gate is the only parameter of the module itself, which has no `reset_parameters()`.
        if config.perform_initialization:
            config.init_method(module.gate_weight)
        return
    module.reset_parameters()
    # The constructor of an embedding also draws random numbers, before Megatron does.
    if isinstance(module, nn.Embedding) and config.perform_initialization:
        config.embedding_init_method(module.weight)


def _is_initialized_after_output_layer(module: nn.Module) -> bool:
    """Whether a Transformer Engine layer has a non-expert matrix on the meta device."""
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    if "transformer_engine" not in packages:
        return False
    return any(
        param.is_meta and param.dim() > 1 and not is_expert(param)
        for param in module.parameters(recurse=False)
    )
