"""Tokenizers of a few tokens, with the pitfalls of large ones."""

import random
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rocm_attn.models.fields import Fields
from rocm_serve.text.gguf_tokenizer import tokenizer_from_gguf
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.tiny_model import CONFIG


def from_gguf(fields: Fields) -> Tokenizer:
    return Tokenizer(backend=tokenizer_from_gguf(fields), bos_token_id=None, chat_template=None)


def sentencepiece_fields(**changes: Any) -> Fields:
    """A SentencePiece vocabulary: bytes, characters, and words with random scores."""
    chooser = random.Random(3)
    words = {"▁" + text[i : i + n] for text in ("hello", "world", "hell", "low") for i in range(4) for n in (1, 2, 3)}
    words |= {text[i : i + n] for text in ("hello", "world", "lower", "▁▁") for i in range(5) for n in (1, 2, 3, 4)}
    words = {word for word in words if word} | {"▁", *"helowrd"}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [float(chooser.randrange(-10_000, 0)) for _ in words]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return Fields({f"tokenizer.ggml.{name}": value for name, value in {**metadata, **changes}.items()}, "test")


def sentencepiece() -> Tokenizer:
    return from_gguf(sentencepiece_fields())


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Splits as GPT-2 does."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def of_bytes() -> tokenizers.Tokenizer:
    """A token for each byte: every character beyond ASCII takes several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return byte_level(models.BPE({letter: token for token, letter in enumerate(letters)}, []))


def of_characters(characters: Iterable[str]) -> tokenizers.Tokenizer:
    """A token for each of these characters, in their order, and one that ends a text."""
    written = {" ": "\u0120", "\n": "\u010a"}  # as byte-level tokenizers write them
    vocabulary = {written.get(character, character): token for token, character in enumerate(characters)}
    backend = byte_level(models.BPE(vocabulary, []))
    backend.add_special_tokens(["<end>"])
    return backend


def half_characters() -> Tokenizer:
    """Every token is the first byte of a longer character."""
    letters = [chr(byte) for byte in range(0xC0, 0xC0 + CONFIG.vocab_size)]
    backend = byte_level(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    return Tokenizer(backend=backend, bos_token_id=None, chat_template=None)
