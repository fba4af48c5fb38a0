"""Sampling: how the next token of each text is picked."""
