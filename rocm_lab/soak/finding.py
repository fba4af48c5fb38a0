"""Finding: what ends a seed, because it must not be."""


class Finding(Exception):
    """Something went wrong and nothing reported it; the message says what."""
