"""Values for parameters that a model was built without: those of a build with memory.

Megatron draws while it constructs, from one stream of random numbers per kind of parameter. Units
get their memory in another order than modules were constructed in, so what shares a stream must
not be drawn when its unit comes:

* Position embeddings, routers and gates of shared experts are made, and drawn in fp32, in host
  memory, from torch's own generator for the CPU, whatever the device of the model. All of a chunk
  are drawn at once, in the order of construction, and wait there for their unit.
* Grouped experts are drawn from the stream of experts, which nothing else uses; their layers come
  in order.
* Layers of Transformer Engine are drawn from the stream of tensor-parallel weights. So is an output
  layer, which has memory from the start and was drawn before them: there, values differ.

Embeddings of the vocabulary and Megatron's own parallel layers name their device, and are never
on the meta device.
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

__all__ = ["OTHER_VALUES", "initializer"]

OTHER_VALUES = (
    "--init-model-with-meta-device: weights of Transformer Engine's layers are drawn after those "
    "of an output layer; on pipeline stages that have one, they start from other values than "
    "without the flag, of the same distribution"
)
"""What is said at start where weights may not be those of a build with memory."""

_logger = logging.getLogger(__name__)


def initializer(config: Any, chunk: nn.Module) -> Callable[[nn.Module], None]:
    """Make what gives values to one module's own parameters, once they have memory.

    Megatron's own FSDP leaves it to `reset_parameters()`, which for a plain embedding is torch's
    unit normal and not what the model was configured with.

    Args:
        config: The transformer configuration.
        chunk: The model chunk, built on the meta device or not.
    """
    waiting = _drawn_on_host(config, chunk)
    if any(_is_drawn_after_others(module) for module in chunk.modules()):
        log_single_rank(_logger, logging.WARNING, OTHER_VALUES)

    def initialize(module: nn.Module) -> None:
        values = waiting.pop(module, None)
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
        # Parts that ranks do not share must not be drawn alike; what they share, they draw alike.
        if any(is_expert(param) for param in own):
            with tracker.fork(get_expert_parallel_rng_tracker_name()):
                reset()
        elif any(getattr(param, "tensor_model_parallel", False) for param in own):
            with tracker.fork():
                reset()
        else:
            reset()

    return initialize


def _drawn_on_host(config: Any, chunk: nn.Module) -> dict[nn.Module, dict[str, torch.Tensor]]:
    """Draw what Megatron draws in host memory, in the order modules were constructed in."""
    drawn = {}
    for module in chunk.modules():
        if not isinstance(module, nn.Embedding | Router | SharedExpertMLP):
            continue
        absent = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        if not absent:
            continue
        # As in a build with memory: in fp32, whatever the model computes in.
        for name, param in absent.items():
            empty = torch.empty(param.shape, dtype=torch.float32, device="cpu")
            module._parameters[name] = nn.Parameter(empty)
        try:
            with torch.no_grad():
                _draw(config, module)
            drawn[module] = {name: module.get_parameter(name).detach() for name in absent}
        finally:
            module._parameters.update(absent)
    return drawn


def _draw(config: Any, module: Any) -> None:
    if isinstance(module, SharedExpertMLP):
        # Its gate is the only parameter of its own, and it has no `reset_parameters()`.
        if config.perform_initialization:
            config.init_method(module.gate_weight)
        return
    module.reset_parameters()
    # The constructor of an embedding draws as well, before Megatron does.
    if isinstance(module, nn.Embedding) and config.perform_initialization:
        config.embedding_init_method(module.weight)


def _is_drawn_after_others(module: nn.Module) -> bool:
    """Whether it is a layer of Transformer Engine with a matrix on the meta device, not experts."""
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    if "transformer_engine" not in packages:
        return False
    return any(
        param.is_meta and param.dim() > 1 and not is_expert(param)
        for param in module.parameters(recurse=False)
    )
