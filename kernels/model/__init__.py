"""Work of a model around attention."""
