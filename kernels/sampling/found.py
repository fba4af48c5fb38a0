"""What is said of a row of logits in the place of its token."""

ALL_ZERO = -1  # every logit of the row is 0
NONE_LEFT = -2  # the request allows no token of a row whose own logits are good; said by the host
