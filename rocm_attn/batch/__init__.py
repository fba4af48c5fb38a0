"""A step as the caller describes it: sequences, lengths, masks, shared prefixes. Also the shape it is padded to."""
