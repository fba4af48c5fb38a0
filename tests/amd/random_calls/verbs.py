"""Verbs: every public call of a runtime that reaches rows, pages or graphs, with values that are sometimes wrong."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rocm_attn.capture.graphs import capture_shapes
from rocm_attn.step.accepting import select_last_accepted
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.kv_scales import KVScales
from rocm_lab.soak import shown_verbs, step_verbs, table_verbs
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.comparisons import compare_rows
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.oracle import UNKNOWN
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from tests.amd.random_calls import hostile_verbs, state_verbs, step_calls, table_calls

Verb = Callable[[Scene], None]


# Calls that concern all rows


def weights(scene: Scene) -> None:
    """Other sinks; or such as no layer has."""
    if scene.rng.random() < 0.5:
        scene.set_weights()
        return
    wrong = HeadWeights(sinks=torch.zeros(7), alibi_slopes=torch.zeros(7))
    scene.call("weights of another layer", lambda: scene.runtime.head_weights.set(0, wrong), wrong="they are bad")


def kv_scales(scene: Scene) -> None:
    """Factors: refused while anything is stored, and for layers that have none."""
    scales = KVScales(0.5, 2.0)
    has_rows = bool(scene.rows or scene.kept)
    bad = scene.kind != "eight bits" or has_rows or scene.open is not None
    scene.call("set_kv_scales", lambda: scene.runtime.set_kv_scales(0, scales), wrong="it is bad" * bad)


def scales_from_scratch(scene: Scene) -> None:
    """All requests go, factors change, and others come."""
    if scene.kind != "eight bits" or scene.open is not None:
        return kv_scales(scene)
    for row in scene.rows:
        scene.end(row)
    scene.drop_all()
    step = scene.rng.choice((0.5, 1.0, 2.0))
    given = scene.call("set_kv_scales", lambda: scene.runtime.set_kv_scales(0, KVScales(step, 1 / step)))
    if given is not REFUSED:
        scene.sent.clear()  # a passport of other factors
        scene.renew_movers()
    return prefill(scene)


def expanded(scene: Scene) -> None:
    """Expanded prefill of a latent layer, in the step that runs or in none."""
    layers = scene.model.layers
    if not scene.is_latent:
        scene.call("expanded prefill", lambda: scene.runtime.expanded_prefill(0), wrong="no layer is latent")
        return
    prefill_of = scene.runtime.expanded_prefill(0)
    layer, heads = layers[0], layers[0].problem.num_q_heads

    def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
        k = latents[:, None].expand(-1, heads, -1)
        return k, k[..., : layer.problem.v_head_dim]

    if scene.open is None:
        q = torch.zeros(2, heads, layer.problem.head_dim, device=scene.device)
        scene.call("expanded without a step", lambda: prefill_of.attend(q, q[:, 0], expand), wrong="no step runs")
        step_calls.begin(scene)
    begun = scene.open
    if begun is None:
        return
    lives = all(begun.changes[seq.row] == scene.history.changes[seq.row] for seq in begun.seqs)
    entries = torch.tensor([entry for seq in begun.seqs for entry in seq.stored], device=scene.device)
    if not len(entries):
        return
    q, k, _ = layer.of(entries)
    given = scene.call("expanded prefill", lambda: prefill_of.attend(q, k[:, 0].contiguous(), expand, chunk_tokens=3))
    if given is REFUSED or not lives:
        return
    out, at = given[0].double().cpu().numpy(), 0
    for seq in begun.seqs:
        kv = scene.oracle.kv[seq.row]
        scene.oracle.kv[seq.row] = kv[: seq.begin] + seq.stored
        answer = scene.oracle.answer(scene.oracle.layers[0], seq.row, seq.tokens())
        scene.oracle.kv[seq.row] = kv
        off = np.abs(out[at : at + len(seq.ids)] - answer.out)
        if not (off[answer.known] <= 4 * answer.out_bound[answer.known] + 1e-6).all():
            raise Finding(f"expanded prefill of row {seq.row} is off by {off[answer.known].max():.2g}")
        at += len(seq.ids)


def captures(scene: Scene) -> None:
    """Every graph is made, or one of them."""
    one = partial(scene.runner.capture, capture_shapes(scene.runtime.padding)[-1:])
    ways: tuple[Callable[[], object], ...] = (scene.runner.capture_all, one)
    scene.call("capture", scene.one_of("captures", ways))


def reopen(scene: Scene) -> None:
    """Other capture sizes, or such as are none."""
    sizes = scene.rng.choice(((4,), (4,), (3,), (), (2, 2)))
    given = scene.call(
        f"reopen for {sizes}", lambda: scene.runner.reopen(sizes, (16,)), wrong="bad" * (sizes in ((), (2, 2)))
    )
    if given is not REFUSED:
        scene.last = None


def unseal(scene: Scene) -> None:
    """Addresses are given up, and perhaps fixed again."""
    seals = scene.runtime.seals
    given = scene.call("unseal", lambda: seals.unseal((4,), (16,)))
    if given is not REFUSED:
        scene.last = None
    if scene.rng.random() < 0.3:
        scene.call("give_up", seals.give_up)
    if scene.rng.random() < 0.5:
        scene.call("seal", seals.seal)
    else:
        scene.call("reseal", lambda: seals.reseal((4,), (16,)))
        scene.last = None


def ask(scene: Scene) -> None:
    """check_device(), of the runtime or of a runner."""
    asks = (scene.runtime.check_device, scene.runner.check_device)
    scene.call("check_device", scene.one_of("ask", asks))


def copied(scene: Scene) -> None:
    """Copies are refused."""
    what = scene.rng.choice((scene.runtime, scene.runner))
    scene.call("deepcopy", lambda: copy.deepcopy(what), wrong="addresses of its device memory")


def accepted_rows(scene: Scene) -> None:
    """select_last_accepted() over a step that is over."""
    if scene.over is None:
        return
    part = scene.over.parts[0]
    if part.parents.numel():
        raise Finding("a step that is no round has parents")
    rows = torch.zeros(part.token_ids.shape[0] + scene.rng.choice((0, 0, 1)), 2, device=scene.device)
    counts = torch.ones(part.row_of_seq.shape[0], dtype=torch.int32, device=scene.device)
    scene.call("select_last_accepted", lambda: select_last_accepted(rows, part, counts))


VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        step_calls.step_whole, step_calls.step_halves, step_calls.step_compiled, step_calls.step_with_rows_worked,
        step_verbs.run_graphed, step_calls.run_graphed_halves, step_calls.run_eagerly, step_calls.step_of_a_thread,
        step_calls.lengths_on_device, step_calls.verify, step_calls.move, step_calls.again_by_hand,
        step_calls.again_by_runner, step_calls.begin, step_calls.stage, step_calls.fill, step_calls.store_one,
        step_calls.attend_one, step_calls.old_layers, step_calls.end, step_calls.draft_chain, step_calls.draft_tree,
        step_calls.draft_runner, table_verbs.admit, table_verbs.reserve, table_calls.reserve_all, table_verbs.truncate,
        table_verbs.free, table_calls.given_to_another, table_verbs.fork, table_calls.evict, table_calls.mark_stored,
        table_verbs.keep, table_verbs.admit_over, table_verbs.drop, table_calls.look, table_calls.export_row,
        table_calls.export_pages, table_calls.import_row, table_calls.import_pages, weights, kv_scales,
        scales_from_scratch, expanded, captures, reopen, unseal, ask, copied, accepted_rows,
        shown_verbs.step_with_mask, shown_verbs.step_with_spans, shown_verbs.step_sharing_prefixes,
        hostile_verbs.step_of_infinities, hostile_verbs.memory_runs_out, hostile_verbs.stray_write,
    )
}  # fmt: skip

# Calls that have nothing to do where layers are recurrent: there are no masks and no rounds, and one layer attends.
_NOT_WITH_STATES = {
    "step_with_rows_worked", "verify", "move", "attend_one", "draft_chain", "draft_tree", "draft_runner", "reserve_all",
    "evict", "look", "weights", "kv_scales", "scales_from_scratch", "expanded", "ask", "copied", "accepted_rows",
    "step_with_mask", "step_with_spans",
}  # fmt: skip
STATE_VERBS: dict[str, Verb] = {name: verb for name, verb in VERBS.items() if name not in _NOT_WITH_STATES} | {
    verb.__name__: verb
    for verb in (
        shown_verbs.verify_drafts, state_verbs.wrong_state, state_verbs.forward_breaks_off, state_verbs.recurrent_call,
        state_verbs.states_of_kept, state_verbs.masks_and_rounds, state_verbs.filled_from_elsewhere,
    )
}  # fmt: skip


# Before and after a few verbs


def prefill(scene: Scene) -> None:
    """Rows that have tokens: three for whom it is new, and a fork."""
    while len(scene.rows) < 3:
        table_verbs.admit(scene)
    seqs = [Seq(row, 0, scene.ids(scene.rng.randint(3, 9))) for row in scene.rows if not scene.history.length(row)][:4]
    if seqs:
        step_verbs.reserve_for(scene, seqs)
        batch = scene.batch(seqs)
        rows = scene.call(
            "prompts", lambda: scene.runner.run(batch), right=not scene.history.unsure & {s.row for s in seqs}
        )
        if rows is not REFUSED:
            scene.staged(batch, seqs)
            scene.history.stored(seqs)


def settle(scene: Scene) -> None:
    """Close what is open; then each request goes on by a token, and gives what the oracle says."""
    step_calls.close(scene)
    scene.compare_pool("closing")
    if scene.listen():
        scene.say("reported at the end")
    scene.provoked = False
    sure = [
        row
        for row in scene.rows
        if scene.history.surely_goes_on(row) and scene.history.length(row) < scene.options.max_kv_len
    ]
    for first in range(0, len(sure), 4):
        _go_on(scene, sure[first : first + 4], right=True)
    for row in [row for row in scene.rows if row not in sure and scene.history.length(row) < scene.options.max_kv_len]:
        if not scene.history.only_device_knows(row):
            _go_on(scene, [row], right=False)
    scene.compare_pool("going on")


def _go_on(scene: Scene, rows: list[int], *, right: bool) -> None:
    seqs = [Seq(row, scene.history.length(row), scene.ids(1)) for row in rows]
    ends = [seq.end for seq in seqs]
    if scene.call(f"room for {rows}", lambda: scene.runtime.table.reserve_all(rows, ends), right=right) is REFUSED:
        return
    batch = scene.batch(seqs)
    given = scene.call(f"rows {rows} go on", lambda: scene.runner.run(batch), right=right)
    if given is REFUSED:
        scene.last = scene.verified = None
        return
    scene.staged(batch, seqs)
    scene.history.stored(seqs)
    compare_rows(scene, f"rows {rows} going on", seqs, given)


def clear(scene: Scene) -> None:
    """Fewer requests and kept pages, so that the next verbs find room."""
    rng = scene.rng
    while len(scene.rows) > 4 or any(scene.history.length(row) > scene.options.max_kv_len - 12 for row in scene.rows):
        row = max(scene.rows, key=scene.history.length) if rng.random() < 0.5 else rng.choice(scene.rows)
        scene.end(row)
    for row in [row for row in scene.rows if not scene.history.surely_goes_on(row) or UNKNOWN in scene.oracle.kv[row]]:
        scene.end(row)
    if len(scene.kept) > 6:
        scene.drop_all()
    scene.sent = scene.sent[-4:]
    scene.log = scene.log[-12:]
