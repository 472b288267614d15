"""Imported by ranks before they are forked: Megatron without `megatron.training`."""

from tests.mcore.core_only import rehearse_for_good

rehearse_for_good()
