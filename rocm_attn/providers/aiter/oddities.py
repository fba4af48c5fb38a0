"""Oddities of AITER's kernels, by their sources, and why they serve all the same; docs/kernels.md lists them."""

from __future__ import annotations

CAP_OVERFLOWS = (
    "A logit of more than 88 times the soft cap overflows to NaN, which is visible. With the caps of models, 30 "
    "and 50, it would take logits of 2,640."
)
LOW_LOGITS = (
    "Logits below -87 could vanish in tiles in which a query sees nothing. It gets sinks of -1e30 if there is a "
    "window, and whole sequences if there is none, so it meets no such tile first."
)
REDUCTION = (
    "Without its reduction in C++, v0.1.20 calls another one with an argument that this one does not accept. The "
    "probe finds out which of the two is installed: it splits sequences, as serving does."
)
TABLE_OVER_READ = (
    "How far it reads a table is unknown. The buffers have room for a turn of its four waves, 256 tokens, past a "
    "sequence's last page, and hold page 0 there."
)
EMPTY_SEQUENCES = (
    "No caller of AITER's own gives it sequences without new tokens, which padded ones are. The probe does, at "
    "the end of a batch and within."
)
FEW_SEQUENCES = (
    "Steps with enough sequences that 16 splits of each fill the device use equal splits: its schedule has not "
    "been measured for bfloat16, and SGLang uses it for FP8 only."
)
MANY_HEADS = (
    "17 to 127 heads are padded to 128. Releases from v0.1.14 on have kernels for 32 and 64. Those merge their "
    "splits in steps that are right for one arch only, and AITER's tests run them on demand only."
)
SATURATED_QUERIES = (
    "Queries are rounded to eight bits with a scale of 1, as vLLM and SGLang do: an element beyond the encoding's "
    "largest value, 240 on gfx942 and 448 on gfx950, saturates."
)
GROUPED_HEADS = (
    "17 to 127 heads run as groups of 16 that each read the latent rows, except 64 and, on gfx950, 32 from "
    "v0.1.18 on. The function allocates room for a share of every group: 160 MB at 128 heads on 304 compute "
    "units, which a graph takes from its pool."
)
