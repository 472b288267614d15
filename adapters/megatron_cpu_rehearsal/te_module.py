"""Common parts of layers that replace Transformer Engine's.

Imported while a rehearsal is under way, since it imports Megatron.
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
    """A module with an extra state, which is empty, and nothing left to do after a backward."""

    def __init__(self) -> None:
        super().__init__()
        hooks: Any = self
        hooks.register_load_state_dict_pre_hook(_state_may_be_absent)

    def backward_dw(self) -> None:
        """Nothing is left: gradients of weights are computed with those of inputs."""

    @override
    def get_extra_state(self) -> None:
        """Nothing: scales of FP8 are what Transformer Engine keeps here."""

    @override
    def set_extra_state(self, state: Any) -> None:
        """Take no state."""


def sharded_entries(
    layer: Any,
    axes: dict[str, int] | None,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: Any = None,
) -> Any:
    """A layer's `sharded_state_dict`.

    Args:
        layer: With the tensor-parallel group as `tp_group`.
        axes: By parameter, the dimension that tensor-parallel ranks hold parts along.
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
