"""Observers of running steps: the flight recorder, the watchdog, the sampled check."""
