"""Runs that show the package at work."""
