"""The server of `rocm-attn serve`: OpenAI's HTTP API over an AsyncEngine. Modules of HTTP alone import fastapi."""
