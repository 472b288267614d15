"""Mamba mixers, whose helper for context parallelism holds parameters past the mixer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_mixer import MambaMixer

__all__ = ["follow_parameters"]

HELD = ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D")
"""Parameters of a mixer that its helper holds as well, under the same name with `_cp1`."""


def _of_mixer(name: str) -> property:
    def look_up(helper: Any) -> Any:
        return getattr(helper.mixer(), name)

    return property(look_up)


class _FollowingParameters(MambaContextParallel):
    """The helper, with the parameters the mixer has now and not those it was built with."""

    mixer: weakref.ref[Any]


for _name in HELD:
    setattr(_FollowingParameters, f"{_name}_cp1", _of_mixer(_name))


def follow_parameters(module: torch.nn.Module) -> None:
    """Have every Mamba mixer compute with the parameters that are registered on it.

    Megatron gives them to a helper when a mixer is built, and the mixer computes with those of the
    helper. Sharding registers others in their place: the helper's would neither be gathered nor
    get their gradients reduced, and stay what they were at the start.

    Args:
        module: A chunk that is not sharded yet.
    """
    for mixer in module.modules():
        if isinstance(mixer, MambaMixer) and type(mixer.cp) is MambaContextParallel:
            for name in HELD:
                del vars(mixer.cp)[f"{name}_cp1"]
            mixer.cp.__class__ = _FollowingParameters
            mixer.cp.mixer = weakref.ref(mixer)
