"""Benchmarks that compare this package with its peers in one run."""
