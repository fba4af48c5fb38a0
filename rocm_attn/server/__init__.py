"""An HTTP server over AsyncEngine, which speaks OpenAI's API."""
