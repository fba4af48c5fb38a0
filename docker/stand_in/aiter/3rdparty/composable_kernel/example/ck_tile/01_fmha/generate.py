"""Stands in for the script that writes Composable Kernel's sources."""
