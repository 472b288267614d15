"""Megatron's own `torch_dist` checkpoints: loaded into sharded runs, and made from their files.

A `torch_dist` folder is one of torch's distributed checkpoint, with tensors laid out in another
way: the layers of a block are stacked into one tensor, and so are experts.
"""
