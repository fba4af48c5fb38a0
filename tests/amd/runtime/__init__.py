"""The runtime against the reference, on every provider of the device."""
