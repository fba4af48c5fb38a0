"""EngineOptions: how a model is served.

An option is one field here or of AttentionOptions: its default, its allowed values, and its help. `rocm-attn generate`
makes its flags from the fields. Only the standard library is imported, because --help does not wait for torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import USED_SHARE
from rocm_attn.machine.option_texts import AttentionOptions, check_options, option, option_texts
from rocm_serve.speculation.methods import NGRAM, OFF, require_method

# Options that change nothing without draft tokens.
_OF_DRAFTS = ("draft_tokens", "topk", "sampled_drafts")


@dataclass(frozen=True, slots=True)
class EngineOptions(AttentionOptions):
    """How a model is served. Options change the text only through rounding, and by sampled_drafts.

    Fields mean what the flags of `rocm-attn serve` with their names do (docs/serve_flags.md), except one:

    capture_after: see StepRunner; None: graphs.eager_steps_before_capture()

    Raises BadSetting.
    """

    latency: float = option(
        0.0,
        "target time between two tokens of a sequence while prompts are prefilled; with a shorter one, a step has "
        "fewer prefill tokens",
        unit="MILLISECONDS",
        least=0,
        default_is="two and a half decode steps of the running sequences; longer while many requests wait; "
        "not bounded on a CPU",
    )
    chunk: int = option(
        0,
        "most tokens per step; a longer prompt takes several steps",
        unit="TOKENS",
        least=1,
        default_is="as many as take a quarter of a second, 2048 to 8192; 512 on a CPU",
    )
    graphs: bool = option(
        True,
        "capture decode steps as graphs at padded batch sizes, and replay them; on a CPU this pays off in long runs",
        default_is="on",
    )
    capture_after: int | None = option(
        None,
        "eager steps of one shape before its graph is captured; Engine.capture_all captures graphs at once",
        kind=int,
        unit="STEPS",
        least=0,
        default_is="0 on a GPU; on a CPU enough that captures take less than a tenth of a run",
        on_generate=False,
    )
    kv_bytes: int | None = option(
        None,
        "most memory for K and V, and for the prefix cache's states of recurrent layers",
        kind=int,
        unit="BYTES",
        default_is="1 GiB on a CPU; on a GPU the remainder of gpu_memory_share",
        on_generate=False,
    )
    gpu_memory_share: float = option(
        USED_SHARE,
        "share of the GPU's memory to use, above 0 and up to 1: K and V get the part that weights, the largest step "
        "and graphs leave, which is measured",
        unit="SHARE",
        above=0,
        most=1,
    )
    prefix_caching: bool = option(
        True,
        "keep K and V of finished requests in free pages, and reuse them for later requests with the same prefix",
        default_is="on",
    )
    host_kv_bytes: int = option(
        0,
        "host memory of each rank for pages that the prefix cache evicts because pages run out; they are copied back "
        "if a later request needs them and their checksums are right",
        unit="BYTES",
        least=0,
        default_is="0: none",
        on_generate=False,
    )
    state_checkpoints: int | None = option(
        None,
        "states of recurrent layers that the prefix cache keeps; a later request with the same prefix starts after "
        "one of them",
        kind=int,
        unit="STATES",
        least=0,
        default_is="as many as take the memory of K and V, and at most one per 64 tokens",
        on_generate=False,
    )
    priority_aging: int = option(
        0,
        "steps after which a waiting request counts as one priority better than new ones, so that no request "
        "starves; 0: priorities never age",
        unit="STEPS",
        least=0,
        on_generate=False,
    )
    speculative: str = option(
        OFF,
        "speculative decoding, with draft tokens from the text itself (ngram), a small model with the same "
        "vocabulary (draft:MODEL), or an EAGLE head (eagle:HEAD, or eagle:seeded)",
        unit="off|ngram|draft:MODEL|eagle:HEAD",
    )
    draft_tokens: int = option(4, "with --speculative: most draft tokens per sequence and step", unit="TOKENS", least=1)
    topk: int = option(1, "with --speculative: most branches of a sequence's draft tokens", unit="BRANCHES", least=1)
    sampled_drafts: bool = option(
        False,
        "with --speculative draft or eagle: sample the draft tokens of sampling requests, and accept them by "
        "rejection sampling; the output keeps its distribution, but differs from that without draft tokens",
    )
    steps_ahead: int | None = option(
        None,
        "1: launch a step while the previous one still runs, so that the GPU does not wait for the host; the "
        "previous tokens are read after the launch, or before it with draft tokens; 0: wait for each step",
        kind=int,
        unit="STEPS",
        least=0,
        default_is="1 on a GPU; 0 on a CPU, where a launch runs the step",
    )
    flight_record: Path | None = option(  # noqa: RUF009  # it makes a field
        None,
        "file for a record of the last steps, written when one fails; `rocm-attn replay-step` reads it",
        kind=Path,
        unit="FILE",
        default_is="no record",
    )
    evidence: Path | None = option(  # noqa: RUF009  # it makes a field
        None,
        "file for the evidence of a layer that --check-every or the truth probe finds wrong: its inputs, which "
        "include requests' K and V, and its machine code; `rocm-attn replay-step --simulate` reads it",
        kind=Path,
        unit="FILE",
        default_is="no evidence",
    )
    check_every: int = option(
        0,
        "run every N-th step again eagerly and compare, and compare a few of its sequences with the reference; the "
        "report counts differences",
        unit="STEPS",
        least=0,
        default_is="0: none",
    )
    hang_after: float = option(
        0.0,
        "report a step that has not ended after this time, with the stacks of all threads, and write the flight record",
        unit="SECONDS",
        least=0,
        default_is="0: never",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_pages is not None and self.kv_bytes is not None:
            raise BadSetting(
                f"num_pages is {self.num_pages} and kv_bytes {self.kv_bytes}, and each says how large the pool is; "
                "leave one of them out"
            )
        require_method(self.speculative)
        for name in () if self.speculates else _OF_DRAFTS:
            if getattr(self, name) != _default(name):
                raise BadSetting(
                    f"{name} is {getattr(self, name)} and speculative is {OFF}, so there are no draft tokens; set "
                    f"speculative to ngram, draft:MODEL or eagle:HEAD, or leave {name} out"
                )
        if self.topk > self.draft_tokens:
            raise BadSetting(
                f"topk is {self.topk} and draft_tokens is {self.draft_tokens}; each branch needs at least one "
                "token, so raise draft_tokens or lower topk"
            )
        if self.sampled_drafts and self.speculative == NGRAM:
            raise BadSetting(
                f"sampled_drafts is on and speculative is {NGRAM}; it needs a small model or an EAGLE "
                "head: use draft:MODEL or eagle:HEAD"
            )
        if self.host_kv_bytes and not self.prefix_caching:
            raise BadSetting(
                f"host_kv_bytes is {self.host_kv_bytes} and prefix_caching is off; host memory keeps pages of the "
                "prefix cache, so switch it on, or leave host_kv_bytes out"
            )
        if self.host_kv_bytes and self.speculative not in (OFF, NGRAM):
            raise BadSetting(
                f"host_kv_bytes is {self.host_kv_bytes} and speculative is {self.speculative}, which keeps K and V of "
                "its own that do not move to host memory; use ngram, or leave host_kv_bytes out"
            )
        files = [place.absolute() for place in (self.flight_record, self.evidence) if place is not None]
        if len(files) > len(set(files)):
            raise BadSetting(
                f"flight_record and evidence are both {self.evidence}, and each would replace the other; name two files"
            )
        if self.steps_ahead not in (None, 0, 1):
            raise BadSetting(
                f"steps_ahead is {self.steps_ahead}; it must be 0 or 1, because a step needs the tokens of the one "
                "before it"
            )

    @property
    def speculates(self) -> bool:
        """True if draft tokens are used."""
        return self.speculative != OFF

    @property
    def rows_of_each(self) -> int:
        """Tokens of a sequence and step that a token may be picked after."""
        return 1 + self.draft_tokens if self.speculates else 1

    def steps_ahead_on(self, device_type: str) -> int:
        """steps_ahead, or its default for a device."""
        if self.steps_ahead is not None:
            return self.steps_ahead
        return 0 if device_type == "cpu" else 1


def without_drafts(options: EngineOptions) -> EngineOptions:
    """The same options without draft tokens."""
    return replace(options, speculative=OFF, **{name: _default(name) for name in _OF_DRAFTS})


def _default(name: str) -> Any:
    """The default of an option."""
    return option_texts(EngineOptions)[name][0]
