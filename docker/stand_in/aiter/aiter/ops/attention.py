"""Names of AITER's attention functions whose modules are not here; the doctor looks for them."""


def mla_decode_fwd() -> None:
    """Not here."""
    raise NotImplementedError("this AITER only stands in")


def paged_attention_ragged() -> None:
    """Not here."""
    raise NotImplementedError("this AITER only stands in")


def unified_attention() -> None:
    """Not here."""
    raise NotImplementedError("this AITER only stands in")
