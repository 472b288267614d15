"""Lion on sharded parameters: an elementwise step of the local rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import override

import torch
from emerging_optimizers.scalar_optimizers import Lion

from megatron_fsdp_v2.dtensor.sharded_rows import add_to_rows
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of, plain_attributes

__all__ = ["ShardedLion"]


class ShardedLion(Lion):
    """`Lion` of emerging_optimizers, for parameters that `fully_shard` made.

    The original class compiles its update for plain tensors. Every rank has state for every
    parameter, including parameters without rows on the rank.
    """

    skips_empty_shards = True

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Perform one step, without communication.

        Args:
            closure: Not supported.

        Raises:
            ValueError: A closure was given.
        """
        if closure is not None:
            raise ValueError("ShardedLion.step takes no closure")
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)
            with plain_attributes():
                params = [p for p in group["params"] if p.grad is not None and local_of(p).numel()]
                grads = [local_of(param.grad) for param in params]
            if not params:
                continue
            weights = [local_of(param) for param in params]
            means = [local_of(self.state[param]["exp_avg"]) for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight, grad in zip(weights, grads, strict=True):
                self._apply_weight_decay_inplace(weight, grad, lr, group["weight_decay"])
            updates = torch._foreach_lerp(means, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_lerp_(means, grads, 1 - beta2)
            add_to_rows(params, updates, alpha=-lr)
