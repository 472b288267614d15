"""Names in checkpoints: sub-tensors, FP8 state, and places in `torch_dist` checkpoints.

`names.py` derives global names from the modules of a model. The rules of this file apply to such
names alone and need neither the model nor Megatron. `StoredNames` maps a name to its place in a
`torch_dist` checkpoint and back, by one table. Rows of `functional_tests/rows.py` load checkpoints
that Megatron saved, and have Megatron load exported ones, for each kind of layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

_FP8_PREFIX = "fp8_state."
_FP8_TENSORS = r"fp8_state\.(?:scale|amax_history)_(?:fwd|bwd)"
_FP8_STATE = re.compile(rf"(?:.*\.)?{_FP8_TENSORS}\d*")

EXPERT_TENSOR_NAME = re.compile(rf"(weight|bias|{_FP8_TENSORS})(\d+)")
"""Matches names below a grouped layer that end in an expert's number: the stem, the number."""

SUBTENSOR_SUFFIXES = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"))
"""Suffixes of sub-tensors, in order: of gated layers, and of two kinds of state-space layers."""
_SUBTENSOR = re.compile(r"(.*[._](?:weight(?:_magnitude)?|bias)\d*)(_[wv]|\.(?:z|x|B|C|dt))")


def unwrapped(name: str) -> str:
    """Return a name without the components that wrappers around the model add."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def split_subtensor_suffix(name: str) -> tuple[str, str]:
    """Split a name into the parameter's name and the suffix of a sub-tensor, which may be empty.

    Args:
        name: A global name.
    """
    match = _SUBTENSOR.fullmatch(name)
    return (name, "") if match is None else (match[1], match[2])


def state_name(tensor: str, expert: int | None) -> str:
    """Return the name of a tensor of FP8's delayed scaling, below its module.

    A module of Transformer Engine with delayed scaling has four tensors. Grouped experts have four
    tensors per expert; the expert's number is appended to the name, as for weights.

    Args:
        tensor: `scale_fwd`, `amax_history_fwd`, `scale_bwd` or `amax_history_bwd`.
        expert: Number of the expert in a grouped layer; None for other modules.
    """
    return f"{_FP8_PREFIX}{tensor}{'' if expert is None else expert}"


def is_fp8_state(key: str) -> bool:
    """Whether an entry of a checkpoint is FP8 state, with any prefix."""
    return _FP8_STATE.fullmatch(key) is not None


def is_history(key: str) -> bool:
    """Whether FP8 state is an amax history, whose first dimension counts steps."""
    return ".amax_history_" in f".{key.rpartition(_FP8_PREFIX)[2]}"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in a `torch_dist` checkpoint.

    Attributes:
        key: Name of the stored tensor.
        leading: Position and length of each leading dimension: layer, expert.
        half: Index of the half of the first dimension after `leading` that the tensor fills; None
            if the tensor fills the whole dimension.
    """

    key: str
    leading: tuple[tuple[int, int], ...] = ()
    half: int | None = None

    def shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored tensor from the shape of the tensor placed in it."""
        lengths = [length for _, length in self.leading]
        return (*lengths, *own) if self.half is None else (*lengths, 2 * own[0], *own[1:])

    def offset(self, own: Sequence[int], start: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the offset of the tensor, or of its block that starts at `start`."""
        first = [*(start or (0,) * len(own))]
        if self.half:
            first[0] += own[0]
        return (*(index for index, _ in self.leading), *first)


_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.+)")
_SEQUENTIAL = re.compile(r"(.*\bmlp\.experts)\.local_experts\.(\d+)\.(.+)")
_GROUPED = re.compile(r"(.*\bmlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_EXPERTS = re.compile(r"(.*\bmlp\.experts)\.experts\.(linear_fc[12]\.(?:weight|bias))")
_ANY_LAYER = r"((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)"

# Prefix, name in the model, name in a checkpoint, suffix, and the field of `StoredNames` that
# enables the renaming. Norms of layers with Megatron's own modules are stored as if they were fused
# into the following linear layer, as Transformer Engine's are.
_RENAMINGS = (
    (r"(.*\bmixer\.conv1d)", "_", ".", r"((?:weight|bias)\b.*)", None),
    (r"(mtp\.layers\.\d+\.)", "mtp_model_layer", "transformer_layer", r"(\..+)", "has_legacy_mtp"),
    *(
        (_ANY_LAYER, norm, f"{linear}.layer_norm_", r"(\w+)", "has_fused_norms")
        for norm, linear in (
            ("input_layernorm.", "self_attention.linear_qkv"),
            ("pre_mlp_layernorm.", "mlp.linear_fc1"),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The rules for one model.

    Attributes:
        num_layers: Number of layers of the decoder.
        num_experts: Number of experts per layer, or 0.
        is_stacked: Whether the layers of the decoder are identical and stacked into one tensor.
        is_grouped: Whether the experts of a layer are one module.
        has_fused_norms: Whether norms are named as if fused into the following linear layer.
        has_legacy_mtp: Whether MTP layers have the name of Megatron's older GPT-only format.
    """

    num_layers: int
    num_experts: int = 0
    is_stacked: bool = True
    is_grouped: bool = False
    has_fused_norms: bool = False
    has_legacy_mtp: bool = True

    @staticmethod
    def of(args: Any) -> StoredNames:
        """Derive the rules from the arguments of a Megatron run.

        Raises:
            FlagError: The names of this kind of model are unknown.
        """
        given = vars(args)
        for name in (
            "heterogeneous_layers_config_path",
            "use_transformer_engine_op_fuser",
            "use_kitchen",
        ):
            if given.get(name):
                flag = flag_of(name)
                raise FlagError(f"names in torch_dist of a model built with {flag} are unknown")
        is_hybrid = bool(given.get("hybrid_layer_pattern") or given.get("is_hybrid_model"))
        frequencies = (given.get("moe_layer_freq"), given.get("linear_attention_freq"))
        is_local = given.get("transformer_impl") == "local"
        return StoredNames(
            num_layers=args.num_layers,
            num_experts=given.get("num_experts") or 0,
            is_stacked=not is_hybrid and not any(map(_is_mixed, frequencies)),
            is_grouped=bool(given.get("moe_grouped_gemm")),
            has_fused_norms=is_local and not is_hybrid and not given.get("multi_latent_attention"),
            has_legacy_mtp=not is_hybrid,
        )

    def place(self, name: str) -> Place:
        """Return the place of a tensor of the model.

        Args:
            name: Global name of the tensor, or of a sub-tensor.
        """
        whole, piece = split_subtensor_suffix(name)
        half = SUBTENSOR_SUFFIXES[0].index(piece) if piece in SUBTENSOR_SUFFIXES[0] else None
        name = whole if half is not None else name
        leading: list[tuple[int, int]] = []
        if match := _SEQUENTIAL.fullmatch(name):
            name = f"{match[1]}.experts.{match[3]}"
            leading = [(int(match[2]), self.num_experts)]
        elif match := _GROUPED.fullmatch(name):
            name = f"{match[1]}.experts.{match[2]}"
            leading = [(int(match[3]), self.num_experts)]
        name = self._translate(name, is_stored=False)
        if self.is_stacked and (match := _LAYER.fullmatch(name)):
            name = match[1] + match[3]
            leading.insert(0, (int(match[2]), self.num_layers))
        return Place(name, tuple(leading), half)

    def names(self, key: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names in the model of the tensors in a stored tensor.

        Args:
            key: Name of the stored tensor.
            shape: Shape of the stored tensor.

        Yields:
            A global name, and the position in the leading dimensions.
        """
        layers: list[tuple[str, tuple[int, ...]]] = [(key, ())]
        if self.is_stacked and (match := _STACKED.fullmatch(key)):
            layers = [(f"{match[1]}{i}.{match[2]}", (i,)) for i in range(shape[0])]
        for name, leading in layers:
            match = _EXPERTS.fullmatch(name)
            if match is None:
                yield self._translate(name, is_stored=True), leading
                continue
            for i in range(shape[len(leading)]):
                suffix = f"{match[2]}{i}" if self.is_grouped else f"local_experts.{i}.{match[2]}"
                yield f"{match[1]}.{suffix}", (*leading, i)

    def _translate(self, name: str, *, is_stored: bool) -> str:
        renamings = reversed(_RENAMINGS) if is_stored else _RENAMINGS
        for prefix, model_name, stored_name, suffix, condition in renamings:
            source, target = (stored_name, model_name) if is_stored else (model_name, stored_name)
            match = re.fullmatch(prefix + re.escape(source) + suffix, name)
            if match and (condition is None or getattr(self, condition)):
                name = match[1] + target + match[2]
        return name


def _is_mixed(frequency: Any) -> bool:
    """Whether layers of two kinds alternate."""
    return isinstance(frequency, list) or (isinstance(frequency, int) and frequency > 1)
