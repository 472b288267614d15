"""Parameter groups: buffers, weights and gradients."""
