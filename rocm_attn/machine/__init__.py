"""What the process runs on: the target, devices, releases, ranks, and settings of the environment."""
