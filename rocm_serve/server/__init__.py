"""The server of `rocm-attn serve`: OpenAI's HTTP API over an AsyncEngine. Only its HTTP modules import fastapi."""
