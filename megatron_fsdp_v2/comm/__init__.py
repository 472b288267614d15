"""Collectives, and all that differs between devices."""
