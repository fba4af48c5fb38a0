"""Kernel providers: what can run attention, and the pure function that chooses."""
