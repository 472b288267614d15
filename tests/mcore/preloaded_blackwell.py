"""What ranks have imported before they are forked: that, on a GPU that has MXFP8."""

from tests.mcore.session import rehearse_for_good

rehearse_for_good("transformer_engine", ["--fp8-recipe", "mxfp8"])
