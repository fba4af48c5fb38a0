"""The two forwards of a draft model: one stores new tokens and returns the first drafts, one runs a draft round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS, AnyDrafts, Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import Int32Array, StepBatch, draft_batch
from rocm_attn.capture.check import CaptureCheck
from rocm_attn.capture.graphs import Progress, capture_shapes, draft_shapes, eager_steps_before_capture, recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part, Series
from rocm_serve.measured_memory import GraphMemory
from rocm_serve.options import EngineOptions
from rocm_serve.request import Sequence as DraftedFor
from rocm_serve.speculation.beams import BeamLevels, Level
from rocm_serve.speculation.drafts import NOT_DRAWN
from rocm_serve.speculation.drawn import drawn_level, samples, terms_of_drafts


class DraftingModel(ABC):
    """A draft model: it returns logits, and may hand a row on from each token to the one after it.

    nothing_carried: [0, width]: with the dtype, width and device of these rows
    """

    nothing_carried: Tensor

    @abstractmethod
    def taken_in(self, step: Part) -> tuple[Tensor, Tensor]:
        """Logits [S, vocab] after the last token of each sequence of a step, and the rows [S, width] handed on."""

    @abstractmethod
    def drafted(self, step: Part, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab] after each token of a draft step, and rows [T, width]; carried: of the tokens before."""

    def tokens(self, drafted: Tensor) -> Tensor:
        """int32, of any shape: the tokens at places in the logits, which may cover only some tokens.

        Returns its argument, without a copy, if each place is that token's id.
        """
        return drafted


def num_levels(options: EngineOptions) -> int:
    """Levels of drafts. With branches there are more drafts than are verified: the likeliest ones are."""
    return min(options.draft_tokens, -(-options.draft_tokens // options.topk) + 1)


def drafts_of(options: EngineOptions) -> AnyDrafts:
    """The round that follows the first level."""
    return Drafts(options.topk, num_levels(options) - 1) if num_levels(options) > 1 else NO_DRAFTS


def num_rows_drawn(options: EngineOptions) -> int:
    """Rows of probabilities that the drafts of a sequence are drawn by."""
    return 1 + (num_levels(options) - 1) * options.topk


def drawn_bytes(options: EngineOptions, vocabulary: int) -> int:
    """Memory of drawn drafts next to K and V: kept rows, and most of a round and of its acceptance.

    Counted per sequence in float32 rows of the vocabulary. Kept: the rows that its drafts were drawn by, and its first
    level's. In a round: the rows of all levels, and a copy of them. In acceptance: p, q and p's weights of each node.
    """
    if not options.sampled_drafts:
        return 0
    rows, nodes = num_rows_drawn(options), 1 + options.draft_tokens
    return 4 * vocabulary * options.max_batch_size * (rows + 1 + 2 * rows + 3 * nodes)


class DraftRunners:
    """Runs a draft model.

    runtime:    its runtime, with the round of drafts_of(options)
    vocabulary: of the model
    """

    def __init__(
        self, runtime: AttentionRuntime, model: DraftingModel, options: EngineOptions, *, vocabulary: int
    ) -> None:
        self._model, self._drafts, self._draws = model, drafts_of(options), options.sampled_drafts
        self.num_levels, branches, most = num_levels(options), options.topk, runtime.padding.seqs.largest
        vocab, device = vocabulary if self._draws else 0, runtime.device
        # torch refuses writes to memory made in inference mode.
        with torch.inference_mode(False):
            self._first_level = Level.empty(most, branches, model.nothing_carried, vocab)
            self._terms = torch.zeros(most, 1 + self.num_levels * branches, device=device)
            # float32 [S, 1 + (levels - 1) * K, vocab], by place of the sequence: the probabilities that its first
            # drafts were drawn by, and those that the drafts after each draft were drawn by, level by level.
            self.probabilities = torch.zeros(most, num_rows_drawn(options), vocab, device=device)
        after = options.capture_after
        made_by = recorder_for(runtime.device) if options.graphs else None
        eager_first = eager_steps_before_capture(runtime.device) if after is None else after
        check = CaptureCheck(vocabulary=vocabulary)
        # A step over new tokens returns the first level, and a round int32 [S, levels, 3, K].
        self._runner: StepRunner[Level | Tensor] = StepRunner(
            runtime, self._taken_in, made_by, draft=self._all_levels, check=check, capture_after=eager_first
        )
        self._runtime = runtime

    @property
    def room(self) -> int:
        """Tokens that a round stores after a sequence's own."""
        return self._drafts.tokens

    @property
    def num_branches(self) -> int:
        """Number of drafts of each level."""
        return self._first_level.token_ids.shape[1]

    def terms(self, sequences: Sequence[DraftedFor]) -> npt.NDArray[np.float32]:
        """See terms_of_drafts; of no sequence if no drafts are drawn, which need none."""
        return terms_of_drafts(sequences if self._draws else (), self.num_levels, self.num_branches)

    def places(self, sequences: Sequence[DraftedFor]) -> list[int]:
        """DraftTree.place for each of a round's sequences."""
        return [place if self._draws and samples(each) else NOT_DRAWN for place, each in enumerate(sequences)]

    def capture_all(self, progress: Progress) -> None:
        self._runner.capture_all(progress)

    def make_largest_graphs(self) -> GraphMemory:
        """Makes the graph of the largest step, and that of the largest round. Returns the memory of all graphs."""
        padding = self._runtime.padding
        steps, rounds = capture_shapes(padding), draft_shapes(padding)
        made = self._runner.capture([*steps[:1], *rounds[:1]]).buckets
        outputs = [
            bucket.output_bytes * shape.num_seqs // bucket.key.shape.num_seqs
            for bucket in made
            for shape in (steps if bucket.key.shape.drafts is NO_DRAFTS else rounds)
        ]
        pool, kept = (sum(getattr(bucket, name) for bucket in made) for name in ("num_bytes", "output_bytes"))
        return GraphMemory(pool, kept, outputs)

    def take_in(self, batch: StepBatch, whole: Sequence[int], terms: npt.NDArray[np.float32]) -> None:
        """Runs a step over new tokens.

        whole: the places for the first drafts of its first sequences
        terms: of its sequences, see terms_of_drafts; not used if no drafts are drawn
        """
        self._put_terms(terms)
        level = cast(Level, self._runner.run(batch))
        if list(whole) == list(range(len(whole))):
            self._first_level.put_first(level.of(len(whole)))
        elif whole:
            self._first_level.put(level, torch.tensor(whole, device=self._runtime.device))

    def _put_terms(self, terms: npt.NDArray[np.float32]) -> None:
        if self._draws:
            self._terms[: len(terms)].copy_(torch.from_numpy(terms))

    def found(self, rows: Int32Array, num_stored: Int32Array, terms: npt.NDArray[np.float32]) -> BeamLevels:
        """All drafts of the sequences that were taken in, in the order of their places.

        rows:       int32 [num_seqs], of the request table, with room for the round
        num_stored: int32 [num_seqs], tokens before the drafts
        terms:      of these sequences, see take_in()
        """
        self._put_terms(terms)
        first = self._first_level.of(len(rows))
        if not isinstance(self._drafts, Drafts):
            self.probabilities[: len(rows), :1].copy_(first.drawn_by)
            return BeamLevels(first.words()[:, None])
        inputs = DeviceInputs(token_ids=first.token_ids.flatten())
        return BeamLevels(cast(Tensor, self._runner.run(draft_batch(rows, num_stored, self._drafts, inputs=inputs))))

    def _taken_in(self, step: Part) -> Level:
        logits, carried = self._model.taken_in(step)
        return self._chosen(Level.first(logits, carried, self.num_branches), logits, carried, 0)

    def _chosen(self, level: Level, logits: Tensor, carried: Tensor, number: int) -> Level:
        """A level with its drafts drawn, if drafts are, and with ids of tokens. Other arguments: see drawn_level()."""
        if self._draws:
            level = drawn_level(level, logits, carried, self._terms, number)
            places = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
            tokens = self._model.tokens(places)
            # The places cover some tokens, or all of them in another order.
            if tokens is not places:
                of_all = level.drawn_by.new_zeros(*level.drawn_by.shape[:2], self.probabilities.shape[2])
                level = level._replace(drawn_by=of_all.index_copy_(2, tokens.long(), level.drawn_by))
        return level._replace(token_ids=self._model.tokens(level.token_ids))

    def _all_levels(self, round_: Series) -> Tensor:
        """int32 [S, levels, 3, K]: the words of all levels, the first one included."""
        num_seqs = round_[0].row_of_seq.shape[0]
        level = self._first_level.of(num_seqs)
        token_ids, words, drawn_by = round_[0].token_ids, [level.words()], [level.drawn_by]
        for number, step in enumerate(round_):
            if number:
                step.set_parents(level.branches)
                token_ids = level.token_ids.flatten()
            logits, carried = self._model.drafted(replace(step, token_ids=token_ids), level.carried.flatten(0, 1))
            level = self._chosen(level.next(logits, carried), logits, carried, number + 1)
            words.append(level.words())
            drawn_by.append(level.drawn_by)
        if self._draws:
            self.probabilities[:num_seqs].copy_(torch.cat(drawn_by, 1))
        return torch.stack(words, 1)
