"""Benchmarks against peers, timed as ratios in one run."""
