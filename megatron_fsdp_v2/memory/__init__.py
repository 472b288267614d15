"""Memory of temporary buffers: allocators, the trace pool, host memory, events."""
