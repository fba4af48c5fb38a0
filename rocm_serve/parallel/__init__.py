"""One process for each tensor-parallel rank, and an engine in front of them."""
