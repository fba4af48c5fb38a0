"""Whole engines with our backend, in virtual environments of their own."""
