"""Counts the clocks of a compiled kernel's innermost loop by the issue rules of CDNA3 and CDNA4."""
