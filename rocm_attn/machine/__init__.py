"""The environment of the process: the target, devices, releases, ranks, and settings from environment variables."""
