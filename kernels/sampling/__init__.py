"""Tokens picked from logits."""
