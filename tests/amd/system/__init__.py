"""Whole systems: everything together, for long."""
