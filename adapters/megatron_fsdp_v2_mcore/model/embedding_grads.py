"""Gradients of a tied embedding, which the first and the last pipeline stage both hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_first_stage
from megatron.core.utils import get_attr_wrapped_model

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = ["add_up_embedding_grads"]


def add_up_embedding_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Megatron's reduction, which assigns a plain tensor to the gradient of a DTensor.

    Both stages shard the embedding identically (see `units.shared_by_stages`), so that the sum of
    their local shards is the shard of the summed gradient.
    """

    def add_up(
        model: list[Any],
        embd_group: Any,
        pp_group: Any,
        weight_getter: Callable[[Any], Any],
        skip_if_none: bool = True,
        config: Any = None,
    ) -> None:
        if embd_group is None or dist.get_world_size(embd_group) <= 1 or not model:
            return
        if not any(isinstance(param, UnevenDTensor) for param in model[0].parameters()):
            original(model, embd_group, pp_group, weight_getter, skip_if_none, config)
            return
        if dist.get_rank() not in dist.get_process_group_ranks(embd_group):
            return
        chunk = model[0] if is_pp_first_stage(pp_group) else model[-1]
        weight = weight_getter(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))
        if weight is not None and weight.grad is not None:
            dist.all_reduce(local_of(weight.grad), group=embd_group)

    return add_up
