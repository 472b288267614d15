"""Several optimizers for one sharded model, which its checkpoints know as one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, override

from megatron_fsdp_v2_mcore.optim.optimizer import ShardedChain, ShardedOptimizer

__all__ = ["FSDPMuonChainedOptimizer", "ShardedEmergingOptimizer"]

STATE, META = "state", "param_to_group_meta"


class ShardedEmergingOptimizer(ShardedOptimizer):
    """A `ShardedOptimizer` of an optimizer that can make its state without a step."""

    @override
    def _state_to_load_into(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        own = self.optimizer.state
        self.optimizer.state = defaultdict(dict)
        try:
            # A step would take all its collectives.
            self.init_state_fn(self.optimizer, self.config)
            return dict(self.optimizer.state), self.optimizer.param_groups
        finally:
            self.optimizer.state = own


class FSDPMuonChainedOptimizer(ShardedChain):
    """Muon for matrices and another optimizer for the rest of a sharded model, stepped as one.

    Megatron's loop has gradients reduced before (`finish_grad_sync`). A step then takes one norm
    over all gradients, clips them all, steps one optimizer after the other, and has the model
    chunks bring their weights up to date. Checkpoints hold the state of one optimizer, by names of
    parameters, so that nothing in them says which optimizer had which parameter.

    Args:
        chained_optimizers: `ShardedOptimizer`s of the same model chunks and configuration.
    """

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient; the model chunks are the same for all optimizers."""
        for optimizer in self.chained_optimizers[:1]:
            optimizer.zero_grad(set_to_none)

    @override
    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """State of all optimizers as that of one.

        Args:
            model_sharded_state_dict: As Megatron has it; not used.
            is_loading: Whether it is to be filled from a file, for which state is made apart.
            **kwargs: `metadata`, which names the format.
        """
        merged: dict[str, Any] = {STATE: {}, META: {}}
        for optimizer in self.chained_optimizers:
            part = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            for key, value in part.items():
                if key in (STATE, META):
                    merged[key].update(value)
                else:
                    merged.setdefault(key, value)
        return merged

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` made, once it was filled: to each what is its own."""
        common = {key: value for key, value in state_dict.items() if key not in (STATE, META)}
        for optimizer in self.chained_optimizers:
            names = {optimizer._param_name(param) for param in optimizer.get_parameters()}
            own = {
                key: {name: value for name, value in state_dict[key].items() if name in names}
                for key in (STATE, META)
            }
            optimizer.load_state_dict({**common, **own})
