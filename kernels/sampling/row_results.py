"""Values that stand for a row of logits instead of its token."""

ALL_ZERO = -1  # every logit of the row is 0
NONE_LEFT = -2  # the request allows no token of a row whose own logits are good; set by the host
