"""The geometry of a model's attention, read from its config.json or .gguf file."""
