"""Imported by ranks before they are forked: Transformer Engine on a GPU with MXFP8."""

from tests.mcore.session import start_permanent_rehearsal

start_permanent_rehearsal("transformer_engine", ["--fp8-recipe", "mxfp8"])
