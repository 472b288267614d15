"""`fully_shard` and what happens at the hooks of the modules it was called on."""
