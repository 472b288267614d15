"""Groups of parameters: their buffers, weights and gradients."""
