"""Which parameters of a model lie in the tensors of a `torch_dist` checkpoint.

`names.py` says where in a checkpoint something lies that has a name in the model. This is the way
back, and every name it finds is checked by going there again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.model_tensors import ModelTensor, Piece
from megatron_fsdp_v2.checkpoint.plain_tensors import PlainTensor
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.common import common_state
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.names import StoredNames
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = ["model_tensors"]

_OTHERS = ("optimizer.", "rng_state/", "rerun_state_machine_state/", "common_state/")

_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\bmlp\.experts)\.experts\.(linear_fc[12])\.(weight|bias)")
_CONVOLUTION = re.compile(r"(.*\bmixer\.conv1d)\.((?:weight|bias)\b.*)")
_MTP = re.compile(r"(mtp\.layers\.\d+)\.transformer_layer\.(.+)")
_FUSED_NORM = re.compile(r"(.*\.)(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(\w+)")
_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}


def model_tensors(folder: CheckpointFolder) -> Sequence[ModelTensor]:
    """List the tensors of the model in a `torch_dist` checkpoint, fused layers in sub-tensors.

    Raises:
        CheckpointError: Its arguments cannot be read, or a tensor's name in the model is not known.
    """
    try:
        args = common_state(MegatronFolder(folder.path))["args"]
        rules = StoredNames.of(args)
    except FlagError as error:
        raise CheckpointError(str(error)) from error
    is_grouped = bool(getattr(args, "moe_grouped_gemm", False))
    found = []
    for key, entry in folder.tensors():
        if key.startswith(_OTHERS):
            continue
        for name, front in _names(key, tuple(entry.size), rules, is_grouped=is_grouped):
            place = rules.place(name)
            positions = tuple(position for position, _ in place.front)
            if (place.key, positions) != (key, front):
                raise CheckpointError(
                    f"{folder.path}: it is not known what {key} is called in the model; load the "
                    "checkpoint into a sharded run and export what that saves"
                )
            own = tuple(entry.size)[len(front) :]
            piece = Piece(key, (*front, *(0 for _ in own)), (*(1 for _ in front), *own))
            tensor = PlainTensor(name, own, entry.properties.dtype)
            found.append(ModelTensor(tensor, (piece,)))
    return found


def _names(
    key: str, shape: tuple[int, ...], rules: StoredNames, *, is_grouped: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of what lies in a tensor, each with its position in the dimensions in front."""
    match = _STACKED.fullmatch(key)
    layers: list[tuple[str, tuple[int, ...]]] = [(key, ())]
    if match is not None and rules.is_stacked:
        layers = [(f"{match[1]}{i}.{match[2]}", (i,)) for i in range(shape[0])]
    for name, front in layers:
        experts = _EXPERTS.fullmatch(name)
        if experts is None:
            yield _renamed(name, rules), front
            continue
        for i in range(shape[len(front)]):
            yield _of_expert(experts, i, is_grouped=is_grouped), (*front, i)


def _of_expert(match: Any, expert: int, *, is_grouped: bool) -> str:
    experts, linear, kind = match.groups()
    if is_grouped:
        return f"{experts}.{linear}.{kind}{expert}"
    return f"{experts}.local_experts.{expert}.{linear}.{kind}"


def _renamed(name: str, rules: StoredNames) -> str:
    match = _CONVOLUTION.fullmatch(name)
    if match is not None:
        name = f"{match[1]}_{match[2]}"
    match = _FUSED_NORM.fullmatch(name)
    if match is not None and rules.has_fused_norms:
        name = f"{match[1]}{_NORMS[match[2]]}.{match[3]}"
    match = _MTP.fullmatch(name)
    if match is not None and rules.drafts_under_old_name:
        name = f"{match[1]}.mtp_model_layer.{match[2]}"
    return name
