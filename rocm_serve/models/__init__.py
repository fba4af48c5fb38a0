"""Models: their weights, their linear layers and their forward pass."""
