"""A tokenizer from GGUF metadata. The vocabulary is in the file; the way of splitting text is only named there."""

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import Fields, shown

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = "|".join((_WORD, r"\p{N}{1,3}", _SIGNS_AND_SPACE))
_QWEN2_PATTERN = "|".join((_WORD, r"\p{N}", _SIGNS_AND_SPACE))


def _byte_level_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level_words()])


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre -> how text is split before byte pairs merge
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level_words,
    "smollm": _single_digits_then_words,
    "llama-bpe": lambda: _split_by(_LLAMA3_PATTERN),
    "qwen2": lambda: _split_by(_QWEN2_PATTERN),
}


def tokenizer_from_gguf(fields: Fields) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises BadModel for an unknown kind of vocabulary."""
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(fields, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(fields, tokens)
    else:
        raise BadModel(f"{fields.source}: tokenizer.ggml.model {shown(kind)} is not known; it must be gpt2 or llama")
    types = _token_types(fields, len(tokens))
    # The unknown one is special, as in llama.cpp: a prompt may name it, and an answer does not write it.
    for add, kinds in ((tokenizer.add_special_tokens, (_CONTROL, _UNKNOWN)), (tokenizer.add_tokens, (_USER_DEFINED,))):
        add([AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k in kinds])
    return tokenizer


def _byte_level_bpe(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    """GPT-2's scheme: every byte is written as a printable character, and the file lists the merges in order."""
    # "default" is llama.cpp's name for files without one, which may be of any model.
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise BadModel(
            f"{fields.source}: tokenizer.ggml.pre {shown(pre)} is not known; "
            f"the runner knows {', '.join(_PRE_TOKENIZERS)}; use the model's directory with tokenizer.json"
        )
    merges = [_pair(fields, merge) for merge in _strings(fields, "tokenizer.ggml.merges")]
    # Llama 3 keeps a word that is in the vocabulary whole, even if the merges lead elsewhere
    tokenizer = Tokenizer(_bpe(fields, tokens, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's scheme: spaces are written as "▁", the merge with the best score goes first, bytes are tokens."""
    scores = _numbers(fields, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise BadModel(f"{fields.source}: {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens")
    tokenizer = Tokenizer(
        _bpe(fields, tokens, _merges_by_score(tokens, scores), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *undo])
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best score first, earlier token first among equals."""
    known = set(tokens)
    ranked = sorted(range(len(tokens)), key=lambda token: -scores[token])
    return [
        (tokens[token][:cut], tokens[token][cut:])
        for token in ranked
        for cut in range(1, len(tokens[token]))
        if tokens[token][:cut] in known and tokens[token][cut:] in known
    ]


def _bpe(fields: Fields, tokens: Sequence[str], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise BadModel(f"{fields.source}: tokenizer.ggml.tokens holds {len(tokens) - len(ids)} tokens twice")
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise BadModel(f"{fields.source}: the merge of {left!r} and {right!r} is not in the vocabulary")
    return models.BPE(ids, merges, **options)


def _pair(fields: Fields, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise BadModel(f"{fields.source}: {shown(merge)} in tokenizer.ggml.merges is not two tokens")
    return left, right


def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.list(name)
    if not all(isinstance(value, str) for value in values):
        raise BadModel(f"{fields.source}: {name} must hold strings")
    return [str(value) for value in values]


def _numbers(fields: Fields, name: str) -> list[float]:
    values = fields.list(name)
    if not all(isinstance(value, int | float) for value in values):
        raise BadModel(f"{fields.source}: {name} must hold numbers")
    return [float(value) for value in values if isinstance(value, int | float)]


def _token_types(fields: Fields, num_tokens: int) -> list[object]:
    types = (
        fields.list("tokenizer.ggml.token_type") if fields.has("tokenizer.ggml.token_type") else [_NORMAL] * num_tokens
    )
    if len(types) != num_tokens:
        raise BadModel(f"{fields.source}: {len(types)} tokenizer.ggml.token_type for {num_tokens} tokens")
    return list(types)
