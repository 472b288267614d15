"""Imported by ranks before they are forked: Transformer Engine on a GPU with MXFP8."""

from tests.mcore.session import rehearse_for_good

rehearse_for_good("transformer_engine", ["--fp8-recipe", "mxfp8"])
