"""Random differential test of sharded training against an unsharded loop."""
