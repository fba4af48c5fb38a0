"""Text to tokens and back, against tokenizers trained here and against the library of transformers."""

import itertools
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from rocm_attn.errors import BadModel, BadRequest
from rocm_attn.models.fields import Fields
from rocm_serve.models.loading import load_tokenizer
from rocm_serve.models.places import find_model
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.gguf_tokenizer import tokenizer_from_gguf
from rocm_serve.text.token_count import TokenCount
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.small_tokenizers import byte_level, from_gguf, of_bytes, sentencepiece, sentencepiece_fields

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, we'll see!",
    "def f(x):\n    return x + 42\n\n\nnaïve café, Ünïcödé, 東京タワー, Привет мир, ½ ² ٣",
    "emoji: 🎉👩‍👩‍👧 and  double   spaces\tand tabs\r\n",
] * 4
TEXTS = [*CORPUS[:3], "", " ", "  lead", "x\n\n 12 345", "<|end|>", "a<|end|>b  <|end|>", "I'M THEY'RE", "🎉"]
SPECIAL = ["<|end|>", "<|start|>"]


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE over CORPUS that splits as GPT-2 does."""
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


class Unlocking:
    """A backend as it is, without the call that holds Python's lock while it works."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name not in ("encode", "encode_batch"), f"{name}() holds Python's lock, or looks for offsets too"
        return getattr(self._backend, name)


@pytest.mark.parametrize("bos", [None, 1])
def test_texts_are_split_without_pythons_lock(trained: tokenizers.Tokenizer, bos: int | None) -> None:
    """A text of megabytes takes seconds; meanwhile a server's other threads run."""
    backend: Any = Unlocking(trained)
    template = ChatTemplate("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    ours = Tokenizer(backend, bos, template)
    for given_text in TEXTS:
        assert ours.encode(given_text) == ([] if bos is None else [bos]) + trained.encode(given_text).ids
        whole = f"<|start|>{given_text}<|end|>"
        assert ours.encode_chat(given_text) == trained.encode(whole, add_special_tokens=False).ids


def test_another_thread_runs_while_a_long_text_is_split(trained: tokenizers.Tokenizer) -> None:
    """Python switches threads here only where one gives the lock away by itself."""
    tokenizer, begun, has_run = Tokenizer(trained, None, None), threading.Event(), threading.Event()
    seen: list[bool] = []

    def split() -> None:
        begun.set()
        tokenizer.encode(CORPUS[0] * 3_000)
        seen.append(has_run.is_set())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        splitting = threading.Thread(target=split)
        splitting.start()
        begun.wait()
        has_run.set()
        splitting.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [True]


def gguf_fields(tokenizer: tokenizers.Tokenizer, **changes: Any) -> Fields:
    """GGUF metadata of a byte-level BPE."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
    }
    return Fields({f"tokenizer.ggml.{name}": value for name, value in {**metadata, **changes}.items()}, "test")


@pytest.mark.parametrize("text", TEXTS)
def test_metadata_gives_the_tokenizer_it_was_made_from(text: str, trained: tokenizers.Tokenizer) -> None:
    ours = from_gguf(gguf_fields(trained))
    assert ours.encode(text) == trained.encode(text).ids
    assert ours.decode(ours.encode(text)) == trained.decode(trained.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "ĠIT", "'", "S", "Ċ", "ĊĠ", "Ġx"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠIT", "'", "S", "Ċ", "ĊĠ", "Ġx"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĠIT", "'S", "ĊĊ", "Ġ", "Ġx"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠIT", "'S", "ĊĊ", "Ġ", "Ġx"]),
    ],
)
def test_each_way_of_splitting_cuts_where_it_should(pre: str, pieces: list[str], trained: tokenizers.Tokenizer) -> None:
    splitter = tokenizer_from_gguf(gguf_fields(trained, pre=pre)).pre_tokenizer
    cut = [piece for piece, _ in splitter.pre_tokenize_str("it's 12345 IT'S\n\n  x")]
    assert "".join(cut) == "".join(pieces)
    assert [piece for piece in cut if piece.strip("ĠĊ")] == [piece for piece in pieces if piece.strip("ĠĊ")]


def test_only_llama_takes_whole_words_before_merging(trained: tokenizers.Tokenizer) -> None:
    fields = gguf_fields(trained)
    # "qzx" is a token that no merge leads to
    tokens = [*fields.list("tokenizer.ggml.tokens"), "qzx"]
    extra = {"tokens": tokens, "token_type": [1] * len(tokens)}
    assert len(from_gguf(gguf_fields(trained, **extra, pre="llama-bpe")).encode("qzx")) == 1
    qwen = from_gguf(gguf_fields(trained, **extra, pre="qwen2"))
    assert len(qwen.encode("qzx")) == 3
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")  # and it alone joins a letter and its accent


def merged_by_score(text: str, fields: Fields) -> list[str]:
    """SentencePiece's algorithm as it is defined: always join the neighbours whose joined token scores best."""
    scores = dict(zip(fields.list("tokenizer.ggml.tokens"), fields.list("tokenizer.ggml.scores"), strict=True))
    pieces: list[str] = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [p for piece in pieces for p in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])]


@given(text=st.text(alphabet="helowrd é", max_size=20))
def test_sentencepiece_merges_by_score(text: str) -> None:
    fields = sentencepiece_fields()
    ours = from_gguf(fields)
    if text:
        assert [ours.backend.id_to_token(token) for token in ours.encode(text)] == merged_by_score(text, fields)
    assert ours.decode(ours.encode(text)) == text


def test_the_unknown_token_is_special_as_in_llama_cpp() -> None:
    unknown, begin = _SENTENCEPIECE.encode("<unk><s>")
    assert (unknown, begin, _SENTENCEPIECE.decode([begin, unknown])) == (0, 1, "")


def test_scores_of_another_length_are_refused() -> None:
    with pytest.raises(BadModel, match=r"1 tokenizer\.ggml\.scores for"):
        tokenizer_from_gguf(sentencepiece_fields(scores=[0.0]))


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    return "".join((*pieces, stream.finish()))


@given(ids=st.lists(st.sampled_from((*range(256), *b"\xf0\x9f\x8e\x89\xe2\x82\xac" * 20)), max_size=60))
def test_streamed_pieces_put_together_are_the_whole_text_even_of_broken_bytes(ids: list[int]) -> None:
    assert streamed(_OF_BYTES, ids) == _OF_BYTES.decode(ids)


@given(text=st.text(alphabet="helowrd é東🎉", max_size=20))
def test_streamed_sentencepiece_keeps_every_space(text: str) -> None:
    assert streamed(_SENTENCEPIECE, _SENTENCEPIECE.encode(text)) == text


def test_a_stream_holds_back_a_character_until_it_is_whole() -> None:
    text = "a🎉東é"
    for tokenizer in (_OF_BYTES, _SENTENCEPIECE):
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
        assert "" in pieces  # the emoji takes several tokens


def test_a_stream_that_ends_inside_a_character_says_so_once() -> None:
    stream = _OF_BYTES.stream()
    pieces = [stream.push(token) for token in _OF_BYTES.encode("ok🎉")[:-1]]
    assert "".join(pieces) == "ok"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


@given(text=st.text(alphabet="helowrd é東🎉", min_size=1, max_size=20), data=st.data())
def test_a_text_and_what_continues_it_are_the_text_of_all_tokens(text: str, data: st.DataObject) -> None:
    """SentencePiece's decoder drops a space where a text begins, and the first new token begins no text."""
    for tokenizer in (_OF_BYTES, _SENTENCEPIECE):
        ids = tokenizer.encode(text)
        cut = data.draw(st.integers(0, len(ids)))
        stream, before = tokenizer.stream(ids[:cut]), tokenizer.decode(ids[:cut])
        continued = "".join((*map(stream.push, ids[cut:]), stream.finish()))
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):  # else the cut is inside a character
            assert before + continued == text


def test_special_tokens_begin_no_text() -> None:
    """A template may write them after the user's text: the answer begins with its space all the same."""
    hello, world = _SENTENCEPIECE.encode("hello"), _SENTENCEPIECE.encode("world")
    (end,) = (token for token in range(9) if _SENTENCEPIECE.backend.id_to_token(token) == "</s>")
    stream = _SENTENCEPIECE.stream([*hello, end, end])
    assert "".join(map(stream.push, world)) == " world"


class Counting:
    """A backend as it is, which counts the tokens that it decodes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self.num_decoded = backend, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("token", ["first byte", "second byte", "no entry"])
def test_a_long_text_without_characters_is_not_decoded_again_for_each_token(token: str) -> None:
    """A client could slow down the others by allowing a single token."""
    backend = of_bytes()
    first, second = backend.encode("é").ids
    ids = [{"first byte": first, "second byte": second, "no entry": backend.get_vocab_size()}[token]] * 1000
    counting: Any = Counting(backend)
    assert streamed(Tokenizer(counting, None, None), ids) == backend.decode(ids)
    assert counting.num_decoded < 100 * len(ids)


_OF_BYTES = Tokenizer(backend=of_bytes(), bos_token_id=None, chat_template=None)
_SENTENCEPIECE = from_gguf(sentencepiece_fields())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = load_tokenizer(find_model("smollm2"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2_of_transformers() -> Any:
    """transformers reads the same file, but passes over how digits are split."""
    path = find_model("smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


@pytest.mark.nightly
@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nHi 2024!<|im_end|>\n"])
def test_smollm2_equals_transformers(text: str, smollm2: Tokenizer, smollm2_of_transformers: Any) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_of_transformers.encode(text)
    assert smollm2.decode(ids) == smollm2_of_transformers.decode(ids, skip_special_tokens=True)


@pytest.mark.nightly
def test_smollm2_chat_prompt_equals_transformers(smollm2: Tokenizer, smollm2_of_transformers: Any) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    rendered = smollm2_of_transformers.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm2.backend.decode(smollm2.encode_chat("Hi there"), skip_special_tokens=False) == rendered


def test_a_tokenizer_json_with_its_template_is_read(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=trained, bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
    fast.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode("The fox") == fast.encode("The fox")
    assert ours.encode_chat("fox") == fast.encode("<|start|>fox<|end|>")


def test_a_tokenizer_json_that_cuts_texts_or_fills_them_up_does_neither(
    trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer.from_str(trained.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for text in (CORPUS[0], "fox"):
        assert ours.encode(text) == ours.encode_unmarked(text) == fast.encode(text)


def test_a_template_in_tokenizer_config_json_is_read(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ eos_token }}{{ messages[0].content }}", "eos_token": {"content": "<|end|>"}}'
    )
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode_chat("fox") == trained.encode("<|end|>fox").ids


def test_a_template_may_write_each_special_token_as_transformers_does(
    trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    """bos_token and eos_token alone were known, so the others left no trace in a prompt."""
    trained.save(str(tmp_path / "tokenizer.json"))
    source = "{{ bos_token }}{{ pad_token }}{{ turn }}{% for m in messages %}{{ m.content }}{{ sep_token }}{% endfor %}"
    options = {
        "chat_template": source,
        "pad_token": "<|end|>",
        "extra_special_tokens": {"turn": "<|end|>"},
        "sep_token": {"__type": "AddedToken", "content": "<|start|>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**options, "add_bos_token": True}))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|start|>"}')  # of older versions
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    said = [{"role": "user", "content": "fox"}]
    assert (
        ours.conversation(said)
        == fast.apply_chat_template(said, tokenize=False)
        == "<|start|><|end|><|end|>fox<|start|>"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"added_tokens_decoder": {"{}": {"content": "<later>", "special": True, "lstrip": True}}},
        {"added_tokens_decoder": {"{}": {"content": "<later>", "special": False}}},
        {"eos_token": "<later>", "pad_token": "<|end|>"},
        {"unk_token": "<other>", "eos_token": "<later>"},
        {"mask_token": "<other>", "pad_token": "<later>"},
        {"mask_token": {"content": "<later>", "__type": "AddedToken", "lstrip": True, "rstrip": True}},
        {"additional_special_tokens": ["<|end|>", {"content": "<later>", "__type": "AddedToken"}]},
        {"extra_special_tokens": {"later_token": "<later>"}},
    ],
    ids=str,
)
def test_tokens_that_tokenizer_json_lacks_are_added_as_in_transformers(
    options: dict[str, Any], trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    """A template's mark was split into its letters, which the model never saw there."""
    trained.save(str(tmp_path / "tokenizer.json"))
    written = json.dumps(options).replace("{}", str(trained.get_vocab_size()))
    (tmp_path / "tokenizer_config.json").write_text(written)
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    text = "The fox <later> fox<|end|><other>"
    assert ours.encode(text) == fast.encode(text)
    assert trained.get_vocab_size() in ours.encode(text)
    assert ("<later>" in ours.decode(ours.encode(text))) == ('"special": false' in written)


@pytest.mark.parametrize("eos", ["<later>", "<|end|>"])
def test_tokens_of_an_older_file_have_its_numbers(eos: str, trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """One that was named got the number of the one before it, and the others were letters."""
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    first = trained.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<later>": first + 1, "<other>": first, "<|end|>": 0}))
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    ids = ours.encode("The fox <later> fox<|end|><other>")
    assert ids == fast.encode("The fox <later> fox<|end|><other>")
    assert {first, first + 1} <= {*ids}
    assert ours.decode(ids) == fast.decode(ids, skip_special_tokens=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<later>": first + 1}))
    with pytest.raises(
        BadModel, match=rf"^added_tokens.json has '<later>' as token {first + 1}, and .* it is {first};"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"sep_token": "<named>"}, {}),
        ({"sep_token": "<named>"}, {"lstrip": True, "rstrip": True}),
        ({"extra_special_tokens": {"named": "<named>"}}, {}),
        ({"added_tokens_decoder": {"{}": {"content": "<named>", "special": True, "rstrip": True}}}, {"lstrip": True}),
        ({"added_tokens_decoder": {"{}": {"content": "<named>", "special": False}}}, {"special": True}),
    ],
    ids=str,
)
def test_a_token_that_tokenizer_config_json_names_is_special(
    options: dict[str, Any], flags: dict[str, bool], trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    """tokenizer.json may not say so. Its name was a part of answers. Flags that both files give are those of this."""
    backend = tokenizers.Tokenizer.from_str(trained.to_str())
    backend.add_tokens([tokenizers.AddedToken("<named>", **{"special": False, **flags})])
    backend.save(str(tmp_path / "tokenizer.json"))
    written = json.dumps(options).replace("{}", str(trained.get_vocab_size()))
    (tmp_path / "tokenizer_config.json").write_text(written)
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    ids = ours.encode("The fox <named> fox")
    assert ids == fast.encode("The fox <named> fox")
    assert ours.decode(ids) == fast.decode(ids, skip_special_tokens=True)
    assert "<named>" not in ours.decode(ids)


def test_a_tokenizer_that_splits_special_tokens_is_refused(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    with pytest.raises(BadModel, match=r"split_special_tokens is true, by which .* set it to false"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("where", [{"eos_token": "qui"}, {"added_tokens_decoder": {"{}": {"content": "qui"}}}], ids=str)
def test_an_entry_of_the_vocabulary_may_be_a_special_token_by_that_file_alone(
    where: dict[str, Any], trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer.from_str(trained.to_str())
    backend.add_tokens(["qui"])
    content = json.loads(backend.to_str())
    entry = content["added_tokens"].pop()
    content["model"]["vocab"]["qui"] = entry["id"]  # no merge leads to it
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(where).replace("{}", str(entry["id"])))
    ours, fast = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.encode("The quick fox") == fast.encode("The quick fox")
    assert entry["id"] in ours.encode("The quick fox")


@pytest.mark.parametrize("pad", ["f", "[PAD]"])
def test_a_token_that_pads_is_no_part_of_a_text(pad: str, trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Fine-tuned models pad with a letter, which transformers takes out of every answer, or with one more token."""
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    ours, text = load_tokenizer(tmp_path), f"fox {pad}"
    assert ours is not None
    assert ours.encode(text) == trained.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("decoder", "sentence"),
    [
        ({"9000": {"content": "<later>"}}, r"^tokenizer_config.json has '<later>' as token 9000, and after tokenizer"),
        ({"9000": {"content": 3}}, r"^tokenizer_config.json: added_tokens_decoder: 9000: content is 3; it must be a"),
        ({"9000": "<later>"}, "added_tokens_decoder: 9000 is '<later>'; it must be an object"),
        ([], r"added_tokens_decoder is \[\]; it must be an object"),
    ],
)
def test_a_token_whose_id_no_file_gives_is_refused(
    decoder: object, sentence: str, trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(BadModel, match=sentence):
        load_tokenizer(tmp_path)


def test_a_template_for_tools_is_read_wherever_it_is(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    named = [{"name": name, "template": name} for name in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    read = [load_tokenizer(tmp_path)]
    (tmp_path / "chat_template.jinja").write_text("default")
    read.append(load_tokenizer(tmp_path))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool_use")
    read.append(load_tokenizer(tmp_path))
    templates = [each.chat_template for each in read if each is not None]
    both, one = ChatTemplate("default", with_tools="tool_use"), ChatTemplate("default")
    assert templates == [both, one, both]


def test_marks_of_calls_are_text_though_a_model_calls_them_special(trained: tokenizers.Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(trained.to_str())
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    ours = Tokenizer(backend=backend, bos_token_id=None, chat_template=None)
    tokens = ours.encode("<other><tool_call>fox</tool_call><|end|>")
    assert ours.decode(tokens) == "<tool_call>fox</tool_call>"
    stream = ours.stream()
    assert "".join(map(stream.push, tokens)) == "<tool_call>fox</tool_call>"


def test_a_template_that_is_no_text_is_refused(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(BadModel, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", '{"model": {}}'])
def test_a_damaged_tokenizer_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadModel, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_model_without_template_asks_for_raw_prompts() -> None:
    with pytest.raises(BadRequest, match=r"no chat template; pass the prompt unchanged .*/v1/completions"):
        _OF_BYTES.encode_chat("hello")


def test_half_of_a_character_is_refused_wherever_it_comes_from() -> None:
    sentence = r"^character 3 of the text is the surrogate U\+DC80, half of a character"
    with pytest.raises(BadRequest, match=sentence):
        _OF_BYTES.encode("ab\udc80")
    template = ChatTemplate("{{ 'ab\\udc80' }}")
    with pytest.raises(BadRequest, match=sentence):
        Tokenizer(backend=_OF_BYTES.backend, bos_token_id=None, chat_template=template).encode_chat("ab")


def test_a_text_that_the_model_has_no_tokens_for_is_refused() -> None:
    """Unigram models without an unknown token refuse characters that they do not know."""
    backend = tokenizers.Tokenizer(models.Unigram([("a", -1.0)]))
    with pytest.raises(BadRequest, match=r"no token for a part of the text \(.*unk_id.*\); leave out characters"):
        Tokenizer(backend=backend, bos_token_id=None, chat_template=None).encode("a東")
    with pytest.raises(BadRequest, match="no token for a part of the text"):
        TokenCount.of(backend).least("a東", 10)


def test_with_another_template_a_tokenizer_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that brings a template would wait for the added tokens of its model to be read."""
    first = Tokenizer(_OF_BYTES.backend, 9, ChatTemplate("{{ bos_token }}first", {"bos_token": "<|start|>"}, "tools"))

    monkeypatch.setattr(Tokenizer, "__post_init__", Mock(side_effect=AssertionError("the tokenizer is made again")))
    other = first.with_template("{{ bos_token }}other")
    said = [{"role": "user", "content": "a"}]
    assert (other.conversation(said), other.conversation(said, [{}])) == ("<|start|>other",) * 2
    assert first.conversation(said) == "<|start|>first"
    assert (other.encode("ab"), other.decode([3, 4])) == (first.encode("ab"), first.decode([3, 4]))
    assert other.bytes_of(3) == first.bytes_of(3)


def test_a_token_before_the_text_is_for_plain_texts_only() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    tokenizer = Tokenizer(backend=_OF_BYTES.backend, bos_token_id=9, chat_template=template)
    assert tokenizer.encode("ab") == [9, *_OF_BYTES.encode("ab")]
    assert tokenizer.encode_chat("ab") == _OF_BYTES.encode("ab")


def test_a_line_with_nothing_but_a_block_leaves_no_line() -> None:
    source = "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    assert ChatTemplate(source).render([{"role": "user", "content": "hi"}]) == "hi\nend"


def test_a_template_may_refuse_and_may_ask_for_the_date() -> None:
    with pytest.raises(BadRequest, match="refuses the messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render([])) == 4


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ 1 + 'a' }}", "{{ messages.__class__.__mro__ }}", "{{ x.y }}", "{{ 1 / 0 }}", "{{ [][1](2) }}"],
)
def test_a_template_that_fails_is_a_bad_model(source: str) -> None:
    with pytest.raises(BadModel, match="chat template fails"):
        ChatTemplate(source).render([])


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_the_bytes_of_a_texts_tokens_are_the_text(kind: str, trained: tokenizers.Tokenizer) -> None:
    tokenizer = sentencepiece() if kind == "SentencePiece" else Tokenizer(trained, None, None)
    before = " " if kind == "SentencePiece" else ""  # its texts begin with a space that the decoder drops
    num_parts = 0
    for text in (*CORPUS, "hello 🎂 low 🎈", "é", "<|end|> a"):
        token_ids = tokenizer.encode_unmarked(text)
        found = [tokenizer.bytes_of(token) for token in token_ids]
        assert b"".join(found) == (before + text).encode()
        num_parts += sum("\N{REPLACEMENT CHARACTER}" in each.decode(errors="replace") for each in found)
    assert num_parts > 3, "some tokens are parts of characters"


def test_the_bytes_of_a_special_token_are_those_of_its_name(trained: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(trained, None, None)
    for name in SPECIAL:
        token = trained.token_to_id(name)
        assert token is not None
        assert tokenizer.bytes_of(token) == name.encode()
        assert not tokenizer.is_text(token)
    assert sentencepiece().bytes_of(1) == b"<s>"
    backend = sentencepiece().backend
    backend.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])  # Gemma's files have such ones
    token = backend.get_vocab_size() - 1
    spaced = Tokenizer(backend, None, None)
    assert spaced.bytes_of(token) == spaced.decode([*spaced.encode("a"), token])[1:].encode() == b"  "
    assert tokenizer.bytes_of(trained.get_vocab_size()) == b"", "no entry"
