"""What looks on while steps run: the flight recorder, the watchdog, profiler ranges, the sampled check."""
