"""Makes context-parallel helpers of Mamba mixers use the mixers' current parameters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_mixer import MambaMixer

HELPER_PARAMETERS = ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D")
"""Parameters of a mixer that its helper also references, under the same name with `_cp1`."""


def _mixer_attribute(name: str) -> property:
    def read(helper: Any) -> Any:
        return getattr(helper.mixer(), name)

    return property(read)


class _RegisteredParametersHelper(MambaContextParallel):
    """A context-parallel helper that reads the parameters currently registered on its mixer."""

    mixer: weakref.ref[Any]


for _name in HELPER_PARAMETERS:
    setattr(_RegisteredParametersHelper, f"{_name}_cp1", _mixer_attribute(_name))


def use_registered_parameters(module: torch.nn.Module) -> None:
    """Make every Mamba mixer compute with the parameters that are registered on it.

    Megatron passes the parameters to a helper when it builds a mixer, and the mixer computes with
    the references of the helper. Sharding replaces the registered parameters. The parameters that
    the helper references would not be gathered, their gradients would not be reduced, and they
    would keep their initial values.

    Args:
        module: A chunk that is not sharded yet.
    """
    for mixer in module.modules():
        if isinstance(mixer, MambaMixer) and type(mixer.cp) is MambaContextParallel:
            for name in HELPER_PARAMETERS:
                del vars(mixer.cp)[f"{name}_cp1"]
            mixer.cp.__class__ = _RegisteredParametersHelper
            mixer.cp.mixer = weakref.ref(mixer)
