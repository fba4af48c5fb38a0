"""KV pages and block tables: the KV pool, the pages of each request, and which tokens are stored."""
