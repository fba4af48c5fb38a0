"""Setting: the runtime of a scene. Scenes of most kinds always have the same one; those of one kind are drawn."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.soak.recurrences import recurrent_forms

CHAIN, TREE = Drafts(1, 3), Drafts(2, 2)
MAX_SEQS, MAX_ROWS, MAX_KV_LEN, NUM_PAGES = 4, 8, 40, 64
DRAWN = "drawn"
KINDS = ("plain", "graphs", "windows", "latent", "eight bits", DRAWN)
# Runtimes with recurrent layers next to one that attends: the settings of both are drawn.
STATES, STATES_IN_GRAPHS = "states", "states in graphs"
WITH_STATES = (STATES, STATES_IN_GRAPHS)
WITH_GRAPHS = ("graphs", "windows", "eight bits", STATES_IN_GRAPHS)


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments that a runtime is built from.

    most_unjudged: steps that may run before the first of them is judged
    most_nodes:    of a tree of drafts; num_drafts: new tokens of a sequence of which any number may be taken back
    """

    problems: list[Problem]
    options: RuntimeOptions
    has_graphs: bool
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS
    most_unjudged: int = 1
    most_nodes: int = 5
    num_drafts: int = 3


def setting_of(kind: str, rng: random.Random, device: torch.device) -> Setting:
    """Returns the setting of a kind; one that is drawn, of small sizes, need not be served."""
    options = RuntimeOptions(
        num_pages=NUM_PAGES,
        max_num_seqs=MAX_SEQS,
        max_num_rows=MAX_ROWS,
        max_kv_len=MAX_KV_LEN,
        provider="torch" if device.type == "cpu" else "auto",
        capture_sizes=(MAX_SEQS,),
        capture_tokens=(16,),
        split_steps=True,
        shared_prefixes=kind in ("plain", "graphs"),
        drafts=(CHAIN, TREE),
    )
    if kind == DRAWN:
        return _drawn(rng, device, options)
    if kind in WITH_STATES:
        return _with_states(kind, rng, device, options)
    if kind == "windows":
        options = replace(options, swa_pages=2 * NUM_PAGES, swa_kept=4, first_swa_page=NUM_PAGES)
    return Setting(_problems(kind, device), options, kind in WITH_GRAPHS)


def _with_states(kind: str, rng: random.Random, device: torch.device, options: RuntimeOptions) -> Setting:
    """Rounds and masks are refused, and neither is captured."""
    forms, kept = rng.sample(recurrent_forms(torch.float32), rng.choice((1, 1, 2, 3))), rng.choice((1, 3, 4))
    recurrent = RecurrentLayers(forms, kept=kept, checkpoints=rng.choice((0, 2, 5)), spacing=rng.choice((0, 0, 8)))
    options = replace(
        options, capture_tokens=(8,), drafts=(), verify_tokens=rng.choice((0, kept)), shared_prefixes=rng.random() < 0.5
    )
    problems = [replace(problem, custom_mask=False) for problem in _problems(kind, device)]
    return Setting(problems, options, kind in WITH_GRAPHS, recurrent, num_drafts=kept)


def _problems(kind: str, device: torch.device) -> list[Problem]:
    dim = 64 if device.type == "cuda" else 4
    of_kind: dict[str, dict[str, Any]] = {
        "latent": {"pool": PoolKind.LATENT, "num_kv_heads": 1, "v_head_dim": dim // 2},
        "eight bits": {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.LAYER},
    }
    base: dict[str, Any] = {
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "head_dim": dim,
        "v_head_dim": dim,
        "dtype": torch.float32,
        "page_size": 4,
        "scale": 0.3,
        "custom_mask": True,
    }
    first = Problem(**{**base, **of_kind.get(kind, {})})
    if kind == "windows":
        return [first, replace(first, window_left=5)]
    if kind in ("plain", "graphs"):
        return [first, replace(first, has_sinks=True)]
    return [first]


def _drawn(rng: random.Random, device: torch.device, options: RuntimeOptions) -> Setting:
    """On a GPU of few head sizes and page sizes, so that kernels are compiled for few of them."""
    on_gpu = device.type == "cuda"
    page_size = rng.choice((4, 16) if on_gpu else (1, 2, 3, 4, 5, 8, 16))
    dtype = rng.choice((torch.float32,) * 6 + ((torch.bfloat16,) if on_gpu else (torch.float16, torch.bfloat16)))
    kinds = [_drawn_problem(rng, dtype, page_size, on_gpu) for _ in range(2)]
    problems = [rng.choice(kinds) for _ in range(rng.choice((1, 2, 3)))]
    num_pages = 8 + 6 * -(-MAX_KV_LEN // page_size)
    if any(problem.window_left >= 0 for problem in problems) and rng.random() < 0.7:
        first = rng.choice((1, num_pages))
        options = replace(
            options, swa_pages=num_pages + first - 1, swa_kept=rng.choice((0, 2, 5)), first_swa_page=first
        )
    options = replace(
        options,
        num_pages=num_pages,
        shared_prefixes=rng.random() < 0.4,
        capture_sizes=(rng.randint(1, MAX_SEQS + 2),),
        capture_tokens=rng.choice(((1,), (8,), (16,))),
    )
    return Setting(problems, options, rng.random() < 0.6)


def _drawn_problem(rng: random.Random, dtype: torch.dtype, page_size: int, on_gpu: bool) -> Problem:
    kv_heads, head_dim = rng.choice((1, 2)), rng.choice((32, 64) if on_gpu else (2, 4, 8))
    return Problem(
        num_q_heads=kv_heads * rng.choice((1, 4) if on_gpu else (1, 2, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if on_gpu else rng.choice((2, 4, 8)),
        dtype=dtype,
        page_size=page_size,
        scale=rng.choice((1.0, 0.5, head_dim**-0.5)),
        window_left=rng.choice((1, 3, 7, 12)) if rng.random() < 0.45 else -1,
        logits_soft_cap=rng.choice((0.0, 0.0, 3.0)),
        has_sinks=rng.random() < 0.3,
        has_alibi_slopes=rng.random() < 0.2,
        custom_mask=True,
        wants_lse=rng.random() < 0.5,
    )
