"""The ledger of AITER's releases: its sources by script, and the page that compares them with this project's tables."""
