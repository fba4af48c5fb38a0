"""The doctor: the facts that it reads, the findings of its checks, and the output of the command."""
