"""Sparse attention: index scores over paged keys, the top-k of each token, and attention over the selection."""
