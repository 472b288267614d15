"""Where Megatron looks in a `torch_dist` checkpoint for what has a name in the whole model.

While a model is there it is asked itself (`stored.py`). A file alone has names only, and the
arguments of the run that wrote it; these rules are what Megatron's modules do with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = ["Place", "StoredNames"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias)\d*)_(w|v)")
_SEQUENTIAL = re.compile(r"(.*\bmlp\.experts)\.local_experts\.(\d+)\.(.+)")
_GROUPED = re.compile(r"(.*\bmlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_CONVOLUTION = re.compile(r"(.*\bmixer\.conv1d)_((?:weight|bias)\b.*)")
_MTP = re.compile(r"(mtp\.layers\.\d+)\.mtp_model_layer\.(.+)")

# The norms of layers made of Megatron's own modules are called as if they were fused into the
# linear layer after them, as they are in Transformer Engine's.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_NORM = re.compile(
    r"((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(\w+_layernorm\.)(\w+)"
)

_HALVES = {"w": 0, "v": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a checkpoint.

    Attributes:
        key: Name of the tensor in the checkpoint.
        front: Position and length of every dimension in front of its own: layer, expert.
        half: Which half of its first own dimension it is; None for all of it.
    """

    key: str
    front: tuple[tuple[int, int], ...] = ()
    half: int | None = None

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint, from that of what lies in it."""
        lengths = tuple(length for _, length in self.front)
        if self.half is None:
            return (*lengths, *own)
        return (*lengths, 2 * own[0], *own[1:])

    def offset(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Where it starts."""
        first = [0] * len(own)
        if self.half:
            first[0] = own[0]
        return (*(index for index, _ in self.front), *first)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The rules for one model.

    Attributes:
        num_layers: Layers of the decoder.
        num_experts: Experts of a layer, or 0.
        is_stacked: Whether the layers of the decoder are one tensor each, being all alike.
        has_fused_norms: Whether norms are called as if fused into the linear layer after them.
        drafts_under_old_name: Whether layers that predict further tokens are called by the name
            they had when there was one kind of model.
    """

    num_layers: int
    num_experts: int = 0
    is_stacked: bool = True
    has_fused_norms: bool = False
    drafts_under_old_name: bool = True

    @staticmethod
    def of(args: Any) -> StoredNames:
        """Find out which rules hold from the arguments of a Megatron run.

        Raises:
            FlagError: The model is of a kind whose names are not known.
        """
        for name, flag in (
            ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path"),
            ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser"),
            ("use_kitchen", "--use-kitchen"),
        ):
            if getattr(args, name, None):
                raise FlagError(f"a model built with {flag} cannot be exported to torch_dist")
        is_hybrid = bool(
            getattr(args, "hybrid_layer_pattern", None) or getattr(args, "is_hybrid_model", False)
        )
        mixed = any(_is_mixed(getattr(args, n, None)) for n in _FREQUENCIES)
        is_local = getattr(args, "transformer_impl", "") == "local"
        return StoredNames(
            num_layers=args.num_layers,
            num_experts=getattr(args, "num_experts", None) or 0,
            is_stacked=not is_hybrid and not mixed,
            has_fused_norms=is_local
            and not is_hybrid
            and not getattr(args, "multi_latent_attention", False),
            drafts_under_old_name=not is_hybrid,
        )

    def place(self, name: str) -> Place:
        """Where something of the whole model lies.

        Args:
            name: Its name, that of a piece where pieces are saved one by one.
        """
        half = None
        match = _HALF.fullmatch(name)
        if match is not None:
            name, half = match[1], _HALVES[match[2]]
        expert: tuple[tuple[int, int], ...] = ()
        match = _SEQUENTIAL.fullmatch(name)
        if match is not None:
            name = f"{match[1]}.experts.{match[3]}"
            expert = ((int(match[2]), self.num_experts),)
        match = _GROUPED.fullmatch(name)
        if match is not None:
            name = f"{match[1]}.experts.{match[2]}.{match[3]}"
            expert = ((int(match[4]), self.num_experts),)
        match = _CONVOLUTION.fullmatch(name)
        if match is not None:
            name = f"{match[1]}.{match[2]}"
        match = _MTP.fullmatch(name)
        if match is not None and self.drafts_under_old_name:
            name = f"{match[1]}.transformer_layer.{match[2]}"
        match = _NORM.fullmatch(name)
        if match is not None and self.has_fused_norms and match[2] in _FUSED_NORMS:
            name = f"{match[1]}{_FUSED_NORMS[match[2]]}{match[3]}"
        match = _LAYER.fullmatch(name)
        if match is None or not self.is_stacked:
            return Place(name, expert, half)
        layer = (int(match[1]), self.num_layers)
        return Place(f"decoder.layers.{match[2]}", (layer, *expert), half)


_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")


def _is_mixed(frequency: Any) -> bool:
    """Whether layers of two kinds take turns."""
    return isinstance(frequency, list) or (isinstance(frequency, int) and frequency > 1)
