"""Speculative decoding: drafters propose draft tokens, and one step of the model verifies several of them."""
