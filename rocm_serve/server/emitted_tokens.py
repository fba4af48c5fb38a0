"""EmittedTokens: logprobs in OpenAI's two forms, and in vLLM's form for prompts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.tokenizer import Tokenizer

Json = dict[str, Any]

# JSON has no infinity. A token that the model excludes gets this number, as in OpenAI's and vLLM's answers.
_EXCLUDED = -9999.0


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """Writes tokens as clients read them. tokenizer: None if tokens have no text"""

    tokenizer: Tokenizer | None

    def beside_text(self, logprobs: Iterable[TokenLogprobs], offset: int, text: str = "") -> tuple[Json, int]:
        """Returns logprobs for /v1/completions, and the next token's offset in the text.

        offset: the first one's; text: of a prompt, in which special tokens may be spelled
        """
        emitted: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        tokens, numbers, likeliest, offsets = emitted.values()
        for each in logprobs:
            tokens.append(self._beside_text(each.token_id))
            numbers.append(_number(each.logprob))
            likeliest.append(self._by_text(each.likeliest))
            offsets.append(offset)
            offset += self._num_characters(each.token_id, text, offset)
        return emitted, offset

    def of_echo(self, prompt: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs], num: int) -> Json:
        """Returns the same for an echoed prompt, whose first token has no logprob.

        text: of the prompt; num: of likeliest tokens
        """
        first = self._num_characters(prompt[0], text, 0)
        cut = (TokenLogprobs(each.token_id, each.logprob, each.likeliest[:num]) for each in logprobs)
        emitted, _ = self.beside_text(cut, first, text)
        before = {"tokens": self._beside_text(prompt[0]), "token_logprobs": None, "top_logprobs": None}
        return {name: [{**before, "text_offset": 0}[name], *values] for name, values in emitted.items()}

    def of_prompt(self, logprobs: Sequence[TokenLogprobs], num: int) -> Iterator[Json | None]:
        """Yields a prompt's logprobs in vLLM's form: for each token null, or token id -> what is known of it.

        num: of likeliest tokens, to which the prompt's own is added
        """
        yield None
        for each in logprobs:
            yield self._ranked(each, num)

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

    def _ranked(self, each: TokenLogprobs, num: int) -> Json:
        """rank: null for a token that is not among the likeliest ones, because it was not counted."""
        known: dict[int, tuple[float, int | None]] = {
            token: (logprob, rank) for rank, (token, logprob) in enumerate(each.likeliest[:num], 1)
        }
        known.setdefault(each.token_id, (each.logprob, None))
        return {
            str(token): {"logprob": _number(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, (logprob, rank) in known.items()
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        of_token = self.tokenizer.bytes_of(token_id) if self.tokenizer is not None else b""
        # Only an id that is no entry of the vocabulary has no bytes.
        return {"token": self._text(token_id), "logprob": _number(logprob), "bytes": list(of_token) or None}

    def _by_text(self, likeliest: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Returns text -> logprob. If several tokens have one text, the likeliest is used."""
        found: dict[str, float] = {}
        for token, logprob in likeliest:
            found.setdefault(self._beside_text(token), _number(logprob))
        return found

    def _beside_text(self, token_id: int) -> str:
        """The token in /v1/completions."""
        return self._text(token_id, "bytes:")

    def _text(self, token_id: int, mark: str = "") -> str:
        """The token's text. A part of a character is written by its bytes, as in \\xf0\\x9f, like OpenAI's.

        mark: put before such bytes
        """
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        of_token = self.tokenizer.bytes_of(token_id)
        try:
            return of_token.decode()
        except UnicodeDecodeError:
            return mark + "".join(f"\\x{byte:02x}" for byte in of_token)

    def _num_characters(self, token_id: int, text: str, offset: int) -> int:
        """Characters of the text that begin in a token. A special one is not in the text, unless a prompt spells it."""
        if self.tokenizer is None:
            return 0
        of_token = self.tokenizer.bytes_of(token_id)
        if not self.tokenizer.is_text(token_id):
            return len(of_token.decode()) if text.startswith(of_token.decode(), offset) else 0
        num = sum(byte & 0xC0 != 0x80 for byte in of_token)
        if not text:
            return num
        # Tokenizers put spaces before a text, and after special tokens, which the text does not have. "▁" is a space to
        # them, too.
        spaces = len(of_token) - len(of_token.lstrip(b" "))
        there = text[offset : offset + spaces]
        return num - spaces + len(there) - len(there.lstrip(" ▁"))


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _EXCLUDED
