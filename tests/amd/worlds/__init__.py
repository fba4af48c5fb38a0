"""A runtime whose every step is compared with the float64 reference: layers, requests, and steps of any kind."""
