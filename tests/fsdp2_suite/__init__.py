"""PyTorch's tests of `fully_shard`, read from a checkout and run with this package's function."""
