"""Pages, and the tables that lead to them: the KV pool, request rows, which tokens are stored."""
