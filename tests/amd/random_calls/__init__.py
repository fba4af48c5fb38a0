"""A random tester of the runtime beside an oracle that shares no code with it: python -m tests.amd.random_calls."""
