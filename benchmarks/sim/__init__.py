"""Both engines on a simulated cluster: `python -m benchmarks.sim`."""
