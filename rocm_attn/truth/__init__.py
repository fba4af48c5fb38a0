"""The needles of `rocm-attn truth`: long contexts in which every query asks for one key."""
