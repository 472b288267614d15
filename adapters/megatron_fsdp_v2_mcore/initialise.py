"""Values for parameters that a model was built without, as Megatron initialises them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from torch import nn

from megatron_fsdp_v2_mcore.tensor_shards import is_expert

__all__ = ["initialiser"]


def initialiser(config: Any) -> Callable[[nn.Module], None]:
    """Make what gives values to one module's own parameters, once they have memory.

    Megatron's own FSDP leaves it to `reset_parameters()`, which for a plain embedding is torch's
    unit normal and not what the model was configured with.

    Args:
        config: The transformer configuration.
    """

    def initialise(module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Embedding):
            config.embedding_init_method(module.weight)
            return
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

    return initialise
