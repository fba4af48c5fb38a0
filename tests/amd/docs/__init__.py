"""The pages as a site: its build, the parts generated from the code, and tests that its commands work as described."""
