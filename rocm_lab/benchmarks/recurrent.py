"""Time of recurrent layers: decode, verify and prompts, next to flash-linear-attention's and FlashKDA's.

    python -m rocm_lab.benchmarks.recurrent --flashkda _flashkda_C.abi3.so \
        --out rocm_lab/benchmarks/results/recurrent_h200.json

Layers are gated delta nets of Qwen3-Next's geometry, Kimi delta attention of Kimi-Linear's and sums of Nemotron-H's, on
one rank each, in bfloat16 with states in float32. The lower bound of decode and verify is a copy of the states of all
sequences, in a graph too. The first peer runs where it is installed. vLLM's wheel has FlashKDA's library, whose kernel
computes decays and strengths from a model's values itself.
Exits with 1, after writing the file, if a result is wrong.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.refs import states as refs
from rocm_attn.kernels.states.arguments import (
    BEGINS,
    RecurArgs,
    RecurrentTokens,
    StatePlaces,
    Update,
)
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.paging.state_pool import RecurrentLayers, StatePool
from rocm_attn.recurrence import Recurrence, rule_of, tensors_of
from rocm_lab.bench.clocks import GraphClock, median_us
from rocm_lab.benchmarks.script import Row, add_library, parser_of, printed, write

_DEVICE = torch.device("cuda", 0)
_CLOCK = GraphClock(_DEVICE, 2000.0)
# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 2e-2
# The least decay of KDA's channels, as a logarithm: FlashKDA needs such a bound.
_LOWER_BOUND = -5.0
# The reference takes a launch for each token.
_MOST_JUDGED = 8192
_LAYERS = {
    "gated delta net": Recurrence(32, 16, 128, 128, torch.bfloat16, normalises=True),
    "Kimi delta attention": Recurrence(32, 32, 128, 128, torch.bfloat16, channel_decay=True, normalises=True),
    "Mamba2": Recurrence(128, 8, 128, 64, torch.bfloat16, Update.SUM, scale=1.0),
}


@dataclass(frozen=True, slots=True)
class StateCase:
    """Sequences with as many new tokens each. kept: tokens that slots have room for"""

    layer: str
    work: str
    num_seqs: int
    q_len: int
    kept: int = 1


def _cases_of(layer: str) -> tuple[StateCase, ...]:
    return (
        *(StateCase(layer, "decode", num_seqs, 1) for num_seqs in (1, 8, 32, 128, 256)),
        *(StateCase(layer, "verify", num_seqs, 5, kept=5) for num_seqs in (1, 32, 128)),
        *(StateCase(layer, "prompt", 1, tokens) for tokens in (2048, 8192, 32768)),
        StateCase(layer, "prompt", 8, 2048),
    )


CASES = tuple(chain.from_iterable(map(_cases_of, _LAYERS)))


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The tensors of a case. gates, strengths: those that decays and beta are made of"""

    gates: Tensor
    strengths: Tensor
    args: RecurArgs

    def run(self) -> None:
        """Runs the layer."""
        launch_recur(self.args, deterministic=False)


def prepared(case: StateCase) -> StateTensors:
    """Random tokens, and random states for sequences that decode or verify; prompts begin."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    num_tokens = case.num_seqs * case.q_len
    layer = _LAYERS[case.layer]

    def random(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device=_DEVICE, dtype=torch.bfloat16)

    keys, values = (layer.num_k_heads, layer.k_dim), (layer.num_heads, layer.v_dim)
    gates, strengths = random(*tensors_of(layer)["decay"].shape), random(layer.num_heads)
    decay = _LOWER_BOUND * gates.float().sigmoid() if layer.channel_decay else -gates.float().exp() / 8
    beta = strengths.float().sigmoid()
    tokens = RecurrentTokens(random(*keys), random(*keys), random(*values), decay, beta, random(*values))
    pool = StatePool(RecurrentLayers([layer], kept=case.kept), num_rows=case.num_seqs + 1, device=_DEVICE)
    slots = pool.state[0]
    for tensor in (slots.state, slots.k, slots.change):
        tensor.normal_(generator=generator)
    slots.decay.fill_(-0.1)
    seqs = torch.arange(1, case.num_seqs + 1, dtype=torch.int32, device=_DEVICE)
    begins = case.work == "prompt"
    places = StatePlaces(
        torch.full_like(seqs, BEGINS) if begins else 2 * seqs,
        2 * seqs + 1,
        torch.zeros_like(seqs) if begins else torch.full_like(seqs, (case.kept + 1) // 2),
        torch.arange(0, num_tokens + 1, case.q_len, dtype=torch.int32, device=_DEVICE),
        num_tokens,
        case.q_len,
    )
    words = slots.workspace_words(rule_of(layer), num_tokens, case.num_seqs)
    workspace = torch.empty(words, device=_DEVICE)
    return StateTensors(gates, strengths, RecurArgs(tokens, rule_of(layer), slots, places, workspace))


def errors_of(made: StateTensors, *outs: Tensor) -> list[float]:
    """The errors of outputs, relative to the reference, token by token in float32."""
    refs.recur(made.args, deterministic=True)
    want = made.args.tokens.out.float()
    return [float((out.view_as(want).float() - want).norm() / want.norm()) for out in outs]


def flashkda(case: StateCase, made: StateTensors) -> Callable[[], Tensor]:
    """The same prompts by FlashKDA; a call returns the outputs."""
    ops, (q, k, v, *_), heads = torch.ops._flashkda_C, made.args.tokens, made.args.tokens.v.shape[1]
    states = torch.zeros(case.num_seqs, *made.args.slots.state.shape[1:], device=_DEVICE)
    after = torch.empty_like(states)
    words = ops.get_workspace_size(len(q), heads, case.num_seqs)
    given = [tensor[None] for tensor in (q, k, v, made.gates, made.strengths)]
    out, room = torch.empty_like(given[2]), torch.empty(words, dtype=torch.uint8, device=_DEVICE)
    no_bias = torch.zeros(heads, device=_DEVICE), torch.zeros(heads, q.shape[2], device=_DEVICE)
    bounds = made.args.places.q_indptr.long()

    def run() -> Tensor:
        ops.fwd(*given, made.args.rule.scale, out, room, *no_bias, _LOWER_BOUND, states, after, bounds, None, None)
        return out

    return run


def peer_of(case: StateCase, made: StateTensors) -> Callable[[], object] | None:
    """The same work by flash-linear-attention; None if it is not installed, or has no such work."""
    tokens, layer = made.args.tokens, _LAYERS[case.layer]
    corrects = layer.update is Update.DELTA
    name = ("kda" if layer.channel_decay else "gated_delta_rule") if corrects else "simple_gla"
    try:
        ops = import_module(f"fla.ops.{name}")
    except ImportError:
        return None
    if case.work == "verify":
        return None
    ratio = layer.num_heads // layer.num_k_heads
    shape = (1, -1) if case.work == "prompt" else (case.num_seqs, 1)
    if case.work == "prompt" and case.num_seqs > 1:
        shape = case.num_seqs, case.q_len
    given: dict[str, Any] = {
        "q": tokens.q.repeat_interleave(ratio, 1),
        "k": tokens.k.repeat_interleave(ratio, 1),
        "v": tokens.v,
        "g": tokens.decay,
    }
    options = {"scale": layer.scale, "output_final_state": True}
    if corrects:
        given["beta"] = tokens.beta.to(torch.bfloat16)
        options["use_qk_l2norm_in_kernel"] = True
    given = {name: tensor.contiguous().view(*shape, *tensor.shape[1:]) for name, tensor in given.items()}
    if case.work == "prompt":
        return partial(getattr(ops, f"chunk_{name}"), **given, **options)
    initial = made.args.slots.state[made.args.places.source.long()].contiguous()
    return partial(getattr(ops, f"fused_recurrent_{name}"), **given, **options, initial_state=initial)


def rows_of(case: StateCase, *, with_flashkda: bool) -> Iterator[Row]:
    """Yields the time of a case."""
    made = prepared(case)
    row: Row = {"layer": case.layer, "work": case.work, "num_seqs": case.num_seqs, "tokens": case.q_len}
    made.run()
    outs = [made.args.tokens.out.clone()]
    if with_flashkda and case.work == "prompt" and _LAYERS[case.layer].channel_decay:
        by_flashkda = flashkda(case, made)
        outs.append(by_flashkda().clone())
        row["flashkda_us"] = median_us(_CLOCK, by_flashkda)
    if case.num_seqs * case.q_len <= _MOST_JUDGED:
        row.update(zip(("error", "flashkda_error"), errors_of(made, *outs), strict=False))
    row["us"] = median_us(_CLOCK, made.run)
    if case.work != "prompt":
        states = torch.zeros_like(made.args.slots.state[: case.num_seqs])
        copy = torch.empty_like(states)
        row["lower_bound_us"] = median_us(_CLOCK, lambda: copy.copy_(states))
    peer = peer_of(case, made)
    if peer is not None:
        with torch.no_grad():
            row["fla_us"] = median_us(_CLOCK, peer)
    yield row


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = parser_of(__doc__)
    add_library(parser, "--flashkda", "_flashkda_C.abi3.so")
    options = parser.parse_args()
    rows = []
    for _ in rows_of(CASES[0], with_flashkda=False):
        pass  # a GPU that was idle is slower at first
    for case in CASES:
        rows += printed(rows_of(case, with_flashkda=bool(options.flashkda)))
        torch.cuda.empty_cache()
    write(options.out, rows=rows)
    sys.exit(any(row.get("error", 0.0) > _MOST_ERROR for row in rows))


if __name__ == "__main__":
    main()
