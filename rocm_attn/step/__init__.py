"""One step, from the batch on the host to the kernels on the device: plan, buffers, publication, layer calls."""
