"""Stands where Composable Kernel writes its sources."""
