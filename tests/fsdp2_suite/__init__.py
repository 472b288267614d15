"""PyTorch's own tests of its `fully_shard`, read from a checkout of it and run with ours."""
