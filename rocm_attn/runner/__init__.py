"""A small model runner on the public API; also the example for authors of model runners."""
