"""A step as the caller gives it: sequences, lengths, masks, shared prefixes. Also the shape that it is padded to."""
