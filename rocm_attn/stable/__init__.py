"""The stable names that are not at the top: `ra.drafts`, `ra.graphs` and so on, a module each."""
