"""The slow and obvious: what the fast code is compared with."""
