"""Imported by ranks before they are forked: Megatron with Transformer Engine."""

from tests.mcore.session import start_permanent_rehearsal

start_permanent_rehearsal("transformer_engine")
