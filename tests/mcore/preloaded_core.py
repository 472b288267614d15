"""Imported by ranks before they are forked: Megatron without `megatron.training`."""

from tests.mcore.core_only import start_permanent_rehearsal

start_permanent_rehearsal()
