"""This package and FSDP2 on a simulated cluster: `python -m benchmarks.sim`."""
