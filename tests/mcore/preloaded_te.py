"""Imported by ranks before they are forked: Megatron with Transformer Engine."""

from tests.mcore.session import rehearse_for_good

rehearse_for_good("transformer_engine")
