"""Simple reference implementations for comparison with the product code."""
