"""Values and owners on the host: no kernel runs here."""
