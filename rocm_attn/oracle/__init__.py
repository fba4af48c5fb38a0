"""The reference results of attention, and the bounds within which a result is close enough."""
