"""Oddities of AITER's kernels, by their sources, and why they serve all the same; docs/kernels.md lists them."""

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
# hsa/gfx942/mla and hsa/gfx950/mla in e4048607: mla_pfl_bf16_a16w16_causal_subQ16_mqa16.co and
# subQ128_mqa128.co branch to their end where a tile begins at or after q_end - q_start (s_sub_u32, s_cmp_le_u32).
EMPTY_SEQUENCES = (
    "No caller of AITER's own gives it sequences without new tokens, which padded ones are. Its code leaves them at "
    "once on both archs, and the probe has some at the end of a batch and within."
)
# aiter/ops/triton/gluon/pa_decode_gluon.py:3011 in e4048607.
SMALL_SCALES = (
    "Where each token or head has a scale, it adds 1e-8 to the largest scale of 256 values. A result is 1% too small "
    "if that scale is 1e-6, which is that of values of 4e-4 and less."
)
LAST_ROWS = (
    "It takes the same number of new tokens from every sequence. Verify steps have any number up to four, so each "
    "sequence gets four rows and its tokens the last ones: two copies a layer, of q and of out."
)
PARTS_OF_WINDOWS = (
    "It loses up to three keys at the end of each part of a sequence without a window, for all queries but the last: "
    "so it is always given one, which cuts at blocks of 256 keys. tests/amd/aiter_source shows both."
)
EIGHT_ROWS = (
    "Eight rows of 16 heads would take another kernel, which is wrong on gfx942 in bfloat16 (aiter#5679: off by "
    "0.11 to 0.16 in v0.1.21.post1 and later, and right with two rows). It is never asked for more than four."
)
FEWER_KEYS = (
    "No test of AITER's has fewer keys than rows in a sequence. Padded sequences have four keys; the probe gives it a "
    "sequence of three, as a short prompt is."
)
FEW_SEQUENCES = (
    "Steps with enough sequences that 16 splits of each fill the device use equal splits: its schedule has not "
    "been measured for bfloat16, and SGLang uses it for FP8 only."
)
MANY_HEADS = (
    "17 to 127 heads are padded to 128. AITER has kernels for 32 and 64. Those merge their "
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
