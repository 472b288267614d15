"""Imported by ranks before they are forked: Megatron with its own layers."""

from tests.mcore.session import start_permanent_rehearsal

start_permanent_rehearsal()
