"""The ledger of AITER's releases: its sources by script, and the page that sets them beside what this project knows."""
