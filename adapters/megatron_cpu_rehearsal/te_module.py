"""Base class of the layers that replace Transformer Engine's.

Import this file only during a rehearsal, since it imports Megatron.
"""

from __future__ import annotations

from typing import Any, override

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

__all__ = ["TransformerEngineModule", "sharded_entries"]


def _state_may_be_absent(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    del layer, others
    state_dict.setdefault(f"{prefix}_extra_state", None)


class TransformerEngineModule(nn.Module):
    """A module with an empty extra state and without delayed weight gradients."""

    def __init__(self) -> None:
        super().__init__()
        hooks: Any = self
        hooks.register_load_state_dict_pre_hook(_state_may_be_absent)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed together with input gradients."""

    @override
    def get_extra_state(self) -> None:
        """Return None; Transformer Engine stores FP8 scales in the extra state."""

    @override
    def set_extra_state(self, state: Any) -> None:
        """Ignore the state."""


def sharded_entries(
    layer: Any,
    axes: dict[str, int] | None,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: Any = None,
) -> Any:
    """Return the `sharded_state_dict` of a layer.

    Args:
        layer: A layer with the tensor-parallel group as `tp_group`.
        axes: Tensor-parallel dimension by parameter name.
        prefix: Prefix of the keys.
        sharded_offsets: Position of this layer in the stacked dimensions.
        metadata: Metadata of the checkpoint.
    """
    return make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=layer.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
