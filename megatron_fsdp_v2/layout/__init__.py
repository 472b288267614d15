"""Layouts of flat buffers, dtypes and placements. Integers and frozen dataclasses, no tensors."""
