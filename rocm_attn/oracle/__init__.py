"""What attention should give, and how close to that is close enough."""
