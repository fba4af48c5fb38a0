"""hip_graphs: the fake recorder on a CPU, and the same tests on a real one if there is a GPU."""
