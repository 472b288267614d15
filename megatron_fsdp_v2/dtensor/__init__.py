"""Tensors of which each rank holds some rows."""
