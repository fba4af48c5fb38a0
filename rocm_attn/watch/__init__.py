"""Observers of running steps: the flight recorder, the watchdog, profiler ranges, the sampled check."""
