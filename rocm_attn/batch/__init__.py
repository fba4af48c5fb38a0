"""A step as the caller gives it: sequences, lengths, masks, shared prefixes; and the shape that it is padded to."""
