"""One module per framework, which makes the framework shard with this package.

Importing a module changes nothing. Its `install(sharding_strategy=...)` checks the version of the
framework, then replaces the attributes that `PATCHES` of the module lists, and `uninstall()`
restores them. No source of a framework changes, and nothing else does.
"""
