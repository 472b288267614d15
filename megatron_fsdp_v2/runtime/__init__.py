"""`fully_shard`, and the runtime of the modules that it shards."""
