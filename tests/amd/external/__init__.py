"""An engine that owns pages, tables, slots and graphs, and what is done to it."""
