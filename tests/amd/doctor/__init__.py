"""The doctor: what it reads, what its checks say, what the command prints."""
