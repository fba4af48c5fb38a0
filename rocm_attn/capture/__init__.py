"""Steps as graphs: what is captured, what it takes, how it is checked and replayed."""
