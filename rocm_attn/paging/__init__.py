"""Pages, and the tables that refer to them: the KV pool, request rows, and the tokens that are stored."""
