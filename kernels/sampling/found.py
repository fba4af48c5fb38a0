"""What is said of a row of logits beside its token."""

ALL_ZERO = -1  # in the place of the token: every logit of the row is 0
