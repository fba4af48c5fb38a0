"""What an engine's options ask for: the forward whose logits verify, and what drafts."""

from __future__ import annotations

from rocm_attn.capture.split_forward import Forward
from rocm_attn.runner.model import Model
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.sampling import TokenPicker
from rocm_attn.runner.speculation.last_rows import LastRows
from rocm_attn.runner.speculation.ngrams import NgramDrafter
from rocm_attn.runner.speculation.speculation import NoSpeculation, Speculation
from rocm_attn.step.metrics import Metrics


def forward_of(model: Model, options: EngineOptions) -> Forward:
    """The model's forward: with logits of as many tokens of each sequence as the options ask for."""
    return LastRows(model, options.rows_of_each) if options.speculates else model.forward


def speculation_of(options: EngineOptions, picker: TokenPicker, metrics: Metrics) -> Speculation | NoSpeculation:
    """What drafts and picks."""
    if not options.speculates:
        return NoSpeculation(picker)
    return Speculation(NgramDrafter(options.topk), picker, options.draft_tokens, metrics)
