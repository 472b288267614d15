"""Collectives, and the differences between devices."""
