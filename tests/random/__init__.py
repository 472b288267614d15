"""Random differential test: generated models and programs, sharded beside the unsharded loop."""
