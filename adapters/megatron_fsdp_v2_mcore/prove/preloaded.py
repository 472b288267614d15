"""Imported before ranks are forked: Megatron, for the layers and the GPU that a proof rehearses."""

import os

from megatron_fsdp_v2_mcore.prove.ranks import VARIABLE
from megatron_fsdp_v2_mcore.prove.session import start

_impl, *_recipe = os.environ[VARIABLE].split()
start(_impl, _recipe)
