"""Checkpoints: any way in, any way out, nothing lost."""
