"""The limits of the kernels that accept drafts. Nothing here imports torch."""

# Nodes of a tree: a program holds all of one.
MOST_NODES = 4096
