"""Which elements live where: pure integers, dtypes and frozen dataclasses, no tensors."""
