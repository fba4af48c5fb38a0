"""Speculative decoding: tokens are guessed, and several of them are verified in one step."""
