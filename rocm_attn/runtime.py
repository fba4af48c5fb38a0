"""AttentionRuntime: paged attention for all layers of a model. It owns the block table, the KV pages and the kernels.

Per step: step() checks a StepBatch and publishes it to the device, the model's layers store K and V and attend, and
end_step() closes the step. Every step goes through one gate (step/gate.py). StepRunner captures steps as graphs.
"""

from typing import NoReturn

import torch

from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, PadTo
from rocm_attn.batch.step_batch import Integers, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, NotCopied, Unsupported, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.machine.agreement import Agree, Agreement, alone
from rocm_attn.machine.devices import on_device, with_index
from rocm_attn.machine.settings import require_kind
from rocm_attn.machine.target import Target
from rocm_attn.paging.canary import what_was_written
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers, StatePool
from rocm_attn.providers.select import Selection
from rocm_attn.step.core import StepCore
from rocm_attn.step.expanded import ExpandedPrefill, PackedAttention
from rocm_attn.step.fault_reports import FaultReports
from rocm_attn.step.gate import AnyPlan, StepGate
from rocm_attn.step.head_weights import LayerHeadWeights
from rocm_attn.step.kv_scales import KVScales, written_pages
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.planner import Planner
from rocm_attn.step.publisher import Publisher
from rocm_attn.step.seals import Seals
from rocm_attn.step.step import Step


class AttentionRuntime:
    """Paged attention for all layers of a model.

    The thread that begins a step must end it; in between, a call from another thread raises WrongState. Layers may be
    called from other threads while the step runs. A runtime cannot be copied or pickled.

    kinds:         the layers, with the kernels that were chosen for them
    options:       its sizes, and which steps may be captured
    recurrent:     recurrent layers, which keep a state per request in place of K and V
    guards:        the safeguards
    agree:         how ranks that share a model's layers agree on graphs and faults; see selection/build.py

    selections:    the chosen kernels, per kind of layer
    target:        the device that they were chosen for
    head_weights:  sinks and ALiBi slopes of each layer
    max_kv_len:    tokens of the longest sequence
    deterministic: whether a sequence's results are bitwise the same in any batch, in every layer
    device:        torch's name of that device
    table, pool:   the block table (RequestTable), and the KV pages of every layer
    states:        the state slots of recurrent layers
    gate:          begins and ends steps, for callers that replay them as graphs
    faults:        device faults of its steps, for ranks that must raise them together, and for trial steps
    seals:         the addresses that captured graphs read

    Raises BadProblem and NeverFits for an impossible pool.
    """

    kinds: LayerKinds
    selections: tuple[Selection, ...]
    target: Target
    head_weights: LayerHeadWeights
    max_kv_len: int
    deterministic: bool

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def __init__(
        self,
        kinds: LayerKinds,
        options: RuntimeOptions,
        recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
        *,
        device: torch.device | str,
        guards: Guards,
        agree: Agreement = alone,
    ) -> None:
        guards.warn()
        self.guards, self.options = guards, options
        self.agree: Agree = agree
        self.device = with_index(device)
        problems, spaces = kinds.problems, kinds.spaces_of_layers
        windows = options.windows(problems)
        num_pages = {Space.FULL: options.num_pages, **{pages.space: pages.num_pages for pages in windows}}
        self.pool = HybridKVPool(problems, spaces, num_pages=num_pages, device=self.device)
        self.table = RequestTable(
            max_num_seqs=options.max_num_seqs,
            max_kv_len=options.max_kv_len,
            num_pages=options.num_pages,
            page_size=self.pool.page_size,
            device=self.device,
            windows=windows,
            max_num_rows=options.max_num_rows,
            recurrent=recurrent,
            guards=guards.table,
        )
        self.states = StatePool(recurrent, num_rows=options.num_rows + 1, device=self.device)
        self.head_weights = LayerHeadWeights(problems, self.device, guards.step.layers.new_head_weights)
        of_memory = self.table, self.pool, guards.step, self.states, self.head_weights
        self.core = core = StepCore(kinds, *of_memory, mask_keys=options.mask_keys)
        self.kinds, self.selections = core.kinds, core.selections
        self.target = self.selections[0].target
        self.max_kv_len = options.max_kv_len
        self.deterministic = kinds.deterministic
        publisher = Publisher(core.ops, self.table, self.pool, self.states, guards.publishing)
        self.graph_runs = publisher.runs
        planner = Planner(
            core.selections,
            options.padding(problems),
            self.device,
            max_kv_len=self.table.width * self.table.page_size,
            sealed_tensors=core.memory.sealed_tensors,
            guards=guards.step.planning,
        )
        self.gate = StepGate(core, self.table, publisher, planner, guards.batch)
        self.faults = FaultReports(
            publisher, self.gate.holder, agree, lambda: what_was_written(self.table, self.pool, range(len(core.layers)))
        )
        self.seals = Seals(core, self.gate, publisher, options, lambda found: self.agree(found), self.check_device)

    def set_kv_scales(self, layer: int, scales: KVScales) -> None:
        """Sets the scales of a layer with eight-bit K and V; they are 1 until then. Captured graphs use the new ones.

        The values are copied into the memory that graphs read. Call it only while no request is admitted and no page is
        kept, because stored K and V would change their values. Raises BadTensor, WrongState; nothing has changed then.
        """
        with self.gate.holder.idle("scales of K and V cannot change"), on_device(self.device):
            require_kind(f"scales of layer {layer}", scales, KVScales, BadTensor)
            k, v = scales.of(layer, self.core.layers.problem(layer))
            if not self.table.is_empty:
                raise WrongState(
                    "scales of K and V cannot change while requests are admitted or pages are kept, because their "
                    "codes would change in value; free them first"
                )
            self.pool.take(layer, written_pages(self.pool.layer(layer), k, v, self.core.guards.layers.new_kv_scales))

    def expanded_prefill(self, layer: int) -> ExpandedPrefill:
        """Returns the non-absorbed (expanded) prefill attention of a latent layer, for the running step.

        Raises BadProblem for a layer that is not latent, or has a window, ALiBi slopes or rows of several tokens, and
        Unsupported in deterministic mode; BadTensor for a layer that does not exist.
        """
        problem = self.core.layers.problem(layer)
        if self.deterministic:
            raise Unsupported(
                "expanded attention cuts prefixes by their number in the step, so results are not the same in any "
                "batch; attend to this layer absorbed, or build without deterministic"
            )
        packed = PackedAttention(problem, self.target, self.options.provider, self.head_weights.of(layer).sinks)
        return ExpandedPrefill(
            problem, self.pool.layer(layer), self.table.full.entries, packed, self.gate.running_batch
        )

    @property
    def padding(self) -> PaddingPolicy:
        """The sizes that steps are padded to, and which steps may be captured."""
        return self.gate.planner.padding

    def plan(self, batch: StepBatch, pad_to: PadTo | PaddedShape | None = None, *, halves: int = 1) -> StepPlan:
        """Plans how a batch runs: its padded shape, kernels and graph. The plan serves every batch that fits it.

        pad_to: sizes that ranks agreed on, for both halves together; or the padded shape to run at, halves included.
                Default: the capture sizes that the batch fits
        halves: 1: the step runs whole; 2: in two halves, for two-batch overlap
        Raises NeverFits, BadBatch; Unsupported for prefixes that no layer can share, and for several branches of drafts
        if a layer's problem has no custom_mask; BadTensor for inputs on another device; BadSetting for other halves.
        """
        require_kind("the batch", batch, StepBatch, BadBatch)
        if isinstance(pad_to, PaddedShape):
            return self.gate.planner.plan_as(batch, pad_to)
        if halves not in (1, HALVES):
            raise BadSetting(f"halves is {halves!r}; it must be 1, or {HALVES} for a step in two halves")
        return self.gate.planner.plan(batch, pad_to, halves)

    def stage(self, batch: StepBatch, plan: AnyPlan | None = None) -> Step:
        """Checks a step and publishes its inputs, like step(), but does not fill. Call Step.fill(), then the layers."""
        require_kind("the batch", batch, StepBatch, BadBatch)
        return self.gate.stage(batch, plan)

    def step(self, batch: StepBatch, plan: AnyPlan | None = None) -> Step:
        """Begins a step: checks it, publishes its inputs, computes its metadata on the device. Then call the layers.

        The step is a context manager; leaving it calls end_step().
        plan: from plan(), for two halves or for sizes that ranks agreed on; AGAIN: runs the last staged step once more,
              on inputs that the device has written in place of the old ones. Default: plan(batch), which runs the step
              whole, or as a draft round
        Raises BadBatch, NeverFits, WrongState, and DeviceFault for an earlier step, once; no step is begun then. Also
        raises what plan() raises.
        """
        require_kind("the batch", batch, StepBatch, BadBatch)
        self.gate.holder.require_free("a step cannot begin")
        try:
            if self.agree is not alone:
                self.faults.meet()
            step = self.gate.stage(batch, plan)
            self.gate.fill()
            return step
        except BaseException:
            self.gate.end()
            raise

    def end_step(self) -> None:
        """Ends the step, so that the next one may begin. Also call it after an exception inside a step.

        The step's tokens count as stored only if K and V were stored in every layer. Does nothing in a thread that has
        begun no step; a step of another thread continues.
        """
        self.gate.end()

    def move_accepted(self, accepted: Accepted, seqs: Integers | None = None) -> None:
        """Moves K and V of accepted draft tokens to their final slots, in all layers; see step/accepting.py.

        Call it once per verify step of draft trees: after the step has stored in every layer, in its forward or after
        it, and before the next step. Chains of drafts need no move.
        seqs: int32 [paths], for each accepted path the index of its sequence in the step's batch. Rows of other
              sequences may have changed meanwhile. None: all sequences in order; a whole step's padding may be included
        Raises BadTensor; WrongState for a second move, after a step without a mask, before the step has stored in every
        layer, and after a row of the step was freed, truncated, forked or kept; BadBatch for sequences that are not in
        the step, and if it may not store; Unsupported for layers whose index keys stand for several tokens.
        """
        require_kind("accepted", accepted, Accepted, BadTensor)
        self.core.moves.check(accepted)
        self.core.moves.move(accepted, self.gate.before_paths(len(accepted.path), seqs))

    def check_device(self) -> None:
        """Waits for the device, and raises DeviceFault for faults of steps that were not reported yet.

        Also raises it if something was written to row 0 of the table or to page 0 of a layer. Ranks that share the
        layers (`agree`) call it together, and each raises the faults of all. For tests, debugging, and whenever serving
        goes idle. Raises WrongState if a step was staged and the graph that takes its inputs was not launched.
        """
        self.faults.check()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopied(
            "a runtime cannot be copied or pickled, because graphs and requests hold addresses of its device "
            "memory; build another one with the same arguments"
        )
