"""Where the bytes of buffers come from."""
