"""Imported by ranks before they are forked: Megatron with its own layers."""

from tests.mcore.session import rehearse_for_good

rehearse_for_good()
