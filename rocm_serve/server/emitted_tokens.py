"""EmittedTokens: logprobs in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.tokenizer import Tokenizer

Json = dict[str, Any]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """Writes tokens as clients read them. tokenizer: None if tokens have no text"""

    tokenizer: Tokenizer | None

    def beside_text(self, logprobs: Sequence[TokenLogprobs], offset: int) -> tuple[Json, int]:
        """Returns logprobs for /v1/completions, and the next token's offset in the text. offset: the first one's"""
        texts = [self._text(each.token_id) for each in logprobs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        emitted = {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [self._by_text(each.likeliest) for each in logprobs],
            "text_offset": offsets,
        }
        return emitted, offset

    def in_messages(self, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        """Returns logprobs for /v1/chat/completions, or None if there are none."""
        if not logprobs:
            return None
        content = [
            {
                **self._token(each.token_id, each.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in each.likeliest],
            }
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._text(token_id)
        # The text of a token that holds a part of a character does not have its bytes.
        whole = list(text.encode()) if _REPLACEMENT not in text else None
        return {"token": text, "logprob": logprob, "bytes": whole}

    def _by_text(self, likeliest: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Returns text -> logprob. If several tokens have one text, the likeliest is used."""
        found: dict[str, float] = {}
        for token, logprob in likeliest:
            found.setdefault(self._text(token), logprob)
        return found

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id]) if self.tokenizer is not None else f"token_id:{token_id}"
