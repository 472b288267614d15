"""Megatron's own `torch_dist` checkpoints: loading into sharded runs, and export from their files.

A `torch_dist` folder has the format of torch's distributed checkpoint with another tensor layout:
the layers of a block are stacked into one tensor, and so are experts.
"""
