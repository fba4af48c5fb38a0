"""The runtime against the oracle, on every provider the device has."""
