"""Speculative decoding: draft tokens are made, and several of them are verified in one step."""
