"""One step from the host's decisions to the device: plan, buffers, publication, and the calls of each layer."""
