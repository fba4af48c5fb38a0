"""Text: tokenizers, chat templates, stop texts and constraints."""
