"""Safeguards switched off: a wrong twin of each."""
