"""An engine that owns pages, tables, slots and graphs, and attacks on it."""
