"""Engine: takes requests, returns tokens. It owns the model, the attention runtime, the scheduler and the prefix cache.

Each step(): the scheduler chooses sequences and token counts, the runner runs the model, tokens are sampled, events are
returned. One thread uses it; AsyncEngine and the server are built on it.
"""

import threading
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import compress
from typing import get_args

import numpy as np

from rocm_attn.capture.check import CaptureCheck
from rocm_attn.capture.graphs import CaptureReport, Progress, eager_steps_before_capture, recorder_for
from rocm_attn.capture.prewarm import run_every_kernel
from rocm_attn.capture.split_forward import Forward
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadRequest, BadSetting, DeviceFault, WrongState
from rocm_attn.machine.compile_watch import compile_watch
from rocm_attn.machine.settings import require_kind
from rocm_attn.step.protocols import NO_EVIDENCE, NO_FLIGHT_RECORDER
from rocm_attn.truth.live import LiveTruth
from rocm_attn.truth.verdict import TruthVerdict
from rocm_attn.watch.evidence import EvidenceFile
from rocm_attn.watch.flight_recorder import FlightRecorder
from rocm_serve.alike_ranks import require_alike
from rocm_serve.engine_runtime import model_over, runtime_for
from rocm_serve.limits import RequestLimits
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.output import Output
from rocm_serve.page_tier import tier_for
from rocm_serve.pending import PendingStep, ReadStep, with_pending_tokens
from rocm_serve.prefix_cache import CachedRow
from rocm_serve.prompt_logprobs import (
    NO_PROMPT_LOGPROBS,
    ComingPromptLogprobs,
    LogitsAndHidden,
    PromptLogprobs,
    PromptPart,
    with_hidden,
)
from rocm_serve.recent_steps import NO_ROUND, RecentSteps
from rocm_serve.report import Report, report_of
from rocm_serve.request import Completion, Event, FailureEvent, FinishReason, Request, Sequence
from rocm_serve.request_times import StepTimes
from rocm_serve.sampling.coming_masks import ComingMasks
from rocm_serve.sampling.compared import RankComparison
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.sampling.parameter_picker import ParameterPicker
from rocm_serve.sampling.sampling import NothingAllowed, Sampler, TokenPicker
from rocm_serve.sampling.sampling_parameters import sampling_parameters_of
from rocm_serve.scheduled_step import NO_SEQUENCE, ScheduledStep
from rocm_serve.scheduler import Scheduler
from rocm_serve.serving import serve_all
from rocm_serve.speculation.device_steps import FOLLOWING, MOST_AHEAD, DeviceSpeculation, Pace, why_no_speculative_steps
from rocm_serve.speculation.engines import beside, drafter_of, read_drafting, rejection_of, served
from rocm_serve.speculation.last_rows import forward_of
from rocm_serve.speculation.speculation import Speculation, StepPicks
from rocm_serve.speculation.speculative_steps import SpeculativeSteps
from rocm_serve.step_sizes import StepSizes
from rocm_serve.text.constraint import library
from rocm_serve.text.matching import matching_of
from rocm_serve.watched import watched_steps


class Engine:
    """Serves requests with one model, by continuous batching.

    submit() queues a request; step() runs one step for all requests; generate() does both until all are done.

    With options.steps_ahead (overlapped scheduling), a step is scheduled and launched while the one before it runs, and
    the tokens of the earlier one are read afterwards. With draft tokens, these are read first and only published
    afterwards. The tokens are the same; step() returns them one step later, and settle() reads the remaining ones.

    An error in one request ends only that request: its Completion has the reason, and the others go on. A device fault
    ends the requests that were in the faulty step, or all that have run if the step is not known. Waiting requests are
    served by later steps. If only some of the step's requests can be at fault, and the others were not harmed (infinite
    or NaN K or V), each is recomputed alone, and those that show the fault again end. Pages that the faulty step may
    have written leave the prefix cache.

    abort() ends a request early and keeps its completion; cancel() forgets it. Both may be called between two steps,
    and by the on_event of generate().

    Raises Unsupported if no kernel serves the model's layers, NeverFits if a pool is impossible, and BadSetting if the
    ranks of a model have different files or options, and for arguments of another kind.
    """

    def __init__(self, loaded: LoadedModel, options: EngineOptions | None = None) -> None:
        self._loaded = loaded
        options = options if options is not None else EngineOptions()
        require_kind("loaded", loaded, LoadedModel, BadSetting)
        require_kind("options", options, EngineOptions, BadSetting)
        require_alike(loaded, options)
        self._sizes = StepSizes.of(loaded, options)
        self.options = options = self._sizes.options
        drafting = read_drafting(loaded, options)
        self.runtime, self._measured = runtime_for(loaded, options, beside(drafting, loaded, options))
        self.max_kv_len = self.runtime.max_kv_len
        self.limits = RequestLimits(
            loaded.config.context_len, self.max_kv_len, loaded.config.vocab_size, loaded.tokenizer
        )
        path = options.flight_record
        model = served(model_over(self.runtime, loaded, options), drafting, options, self.runtime)
        self._steps_ahead = options.steps_ahead_on(self.runtime.device.type)
        ops, most = self.runtime.core.ops, options.max_batch_size
        plain = TokenPicker(self.runtime.device, most * options.rows_of_each, ops.pick_rows)
        self._picker = ParameterPicker(plain, ops, loaded.config.vocab_size, most)
        self._matching = matching_of(loaded)
        computed = threading.Condition() if self._matching is None else self._matching.computed
        self._masks = ComingMasks(computed, loaded.ranks.least_of_each, may_leave_out=self.runtime.states.is_empty)
        forward = forward_of(model, options)
        of_prompts: Forward[LogitsAndHidden] = with_hidden(model, options)
        if self._steps_ahead and not options.speculates:
            forward = with_pending_tokens(forward, plain.tokens)
            of_prompts = with_pending_tokens(of_prompts, plain.tokens)
        self.flight = FlightRecorder(self.runtime, path) if path is not None else NO_FLIGHT_RECORDER
        kept = options.evidence
        self._evidence = NO_EVIDENCE if kept is None else EvidenceFile(self.runtime, kept)
        # On several ranks a step sums over all of them: one that runs it again alone would wait for the others.
        of_steps = self._evidence if loaded.ranks.shard.num_ranks == 1 else NO_EVIDENCE
        watched = watched_steps(self.runtime, forward, options, self.flight, of_steps, self._new_runner)
        self._runner, self._steps, self._watch = watched
        self.metrics = self._runner.metrics
        runner_of_prompts = StepRunner(self.runtime, of_prompts, None, flight=self.flight)
        runner_of_prompts.metrics = self.metrics
        rows, vocab = most * options.rows_of_each, loaded.config.vocab_size
        self._prompts = PromptLogprobs(model, runner_of_prompts, ops, vocab, rows)
        # A recorder or watcher of single steps needs the host to plan each step.
        looks_on = self._steps is not self._runner or path is not None
        host_plans = why_no_speculative_steps(
            options,
            num_ranks=loaded.ranks.shard.num_ranks,
            looks_on=looks_on,
            has_states=not self.runtime.states.is_empty,
        )
        in_words = f"planned by the host: {host_plans}" if host_plans else FOLLOWING
        self._speculative_in_words = in_words if options.speculates else ""
        drafter = drafter_of(drafting, loaded, options, self.runtime, model)
        self._speculative_steps = SpeculativeSteps()
        if options.speculates and not host_plans:
            self._speculative_steps = DeviceSpeculation(
                self.runtime, self._runner, plain, options.draft_tokens, MOST_AHEAD * self._steps_ahead
            )
        self._speculation = Speculation(
            drafter,
            self.runtime,
            self._picker,
            options.draft_tokens,
            self.metrics,
            rejection_of(drafter, options),
            has_speculative_steps=isinstance(self._speculative_steps, DeviceSpeculation),
        )
        self._scheduler = Scheduler(
            self.runtime.table,
            self.metrics,
            replace(self._sizes.budget, sizes=self.runtime.padding.prompts),
            max_kv_len=self.max_kv_len,
            steps_until_known=self.runtime.faults.steps_until_known,
            priority_aging=options.priority_aging,
            tier=tier_for(loaded, self.runtime, options.host_kv_bytes, self.metrics),
        )
        self._outputs: dict[int, Output] = {}
        self._done: dict[int, Completion] = {}
        self._events: list[Event] = []  # not yet returned by step()
        self._must_check = False  # whether a step has run since the host last waited for the device
        self._recent, self._pace = RecentSteps(), Pace()
        self._pending: list[PendingStep] = []  # oldest first
        self._is_launching = False  # whether a step is being launched that is not in _unread yet
        self._read: list[ReadStep] = []  # steps whose tokens are to be published, oldest first
        self._compared = RankComparison(self.runtime.faults.meetings, has_ranks=loaded.ranks.shard.num_ranks > 1)
        self._num_submitted = 0
        self._is_in_step = False  # afterwards too, if an interrupt has ended the step
        self._num_compiled = compile_watch().num_compiled  # before the first request
        self._times = StepTimes(self.metrics)

    def _new_runner(self, forward: Forward) -> StepRunner:
        after = self.options.capture_after
        return StepRunner(
            self.runtime,
            forward,
            recorder_for(self.runtime.device) if self.options.graphs else None,
            check=CaptureCheck(vocabulary=self._loaded.config.vocab_size),
            flight=self.flight,
            capture_after=eager_steps_before_capture(self.runtime.device) if after is None else after,
        )

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished, or an event was not returned yet. Call step() only then."""
        return self._scheduler.has_work or bool(self._events)

    def capture_all(self, progress: Progress) -> CaptureReport:
        """Captures every graph. Call it before the first request arrives, so that no request waits for a capture.

        It empties the prefix cache, because graphs are checked on free pages.
        progress: see StepRunner.capture_all
        """
        self.forget_prefixes()
        started = time.perf_counter()
        try:
            self._speculation.capture_all(progress)
            return self._runner.capture_all(progress)
        finally:
            self.metrics.seconds += time.perf_counter() - started

    def compile_all(self, progress: Progress) -> None:
        """Compiles every kernel of eager steps and of sampling, so that no request waits for a compile.

        Call it last before the first request: the metric compiles_after_start counts later compiles.
        progress: as in capture_all(). Raises DeviceFault
        """
        self.forget_prefixes()
        rows = self.options.max_batch_size * self.options.rows_of_each
        run_every_kernel(self.runtime, max(self.options.chunk, rows), self._runner.run_eagerly, progress)
        self._must_check = True
        self._check_device()
        self._num_compiled = compile_watch().num_compiled

    def submit(self, request: Request) -> int:
        """Queues a request; returns its number. Raises BadRequest, and changes nothing else then."""
        self._require_whole()
        self.check(request)
        matcher = None
        if request.constraint is not None:
            assert self._matching is not None, "check() refuses it"
            matcher = self._matching.matcher(request.constraint, request.stop_token_ids)
        number = self._num_submitted
        self._num_submitted += 1
        self.metrics.requests += 1
        self.metrics.note_prompt(len(request.prompt_token_ids))
        stops = frozenset(request.stop_token_ids + (() if request.ignore_eos else self._loaded.config.eos_token_ids))
        sequence = Sequence(
            number=number,
            request=request,
            stops=stops,
            sampler=Sampler(request.sampling),
            token_ids=array("i", request.prompt_token_ids),
            cached_row=CachedRow(request.cache_salt, is_cached=self._may_cache(request)),
            parameters=sampling_parameters_of(request, stops, matcher, self._loaded.config.vocab_size),
        )
        if matcher is not None:
            self._masks.add(sequence, matcher)
        self._outputs[number] = Output(sequence, self._loaded.tokenizer if request.detokenise else None)
        self._prompts.add(sequence)
        self._scheduler.add(sequence)
        return number

    def _may_cache(self, request: Request) -> bool:
        states = self.runtime.states
        can_begin_later = states.is_empty or states.recurrent.checkpoints > 0
        asks_for_it = self.options.prefix_caching and request.prefix_caching
        return asks_for_it and can_begin_later and request.prompt_logprobs == NO_LOGPROBS

    def abort(self, number: int, reason: FinishReason = "abort") -> None:
        """Ends a request that waits or runs. Its completion has the tokens so far, and this finish_reason.

        reason: "stop" if the caller detokenises and has found a stop text
        The next step() returns an AbortEvent; completion() returns the result. The pages are freed, or stay in the
        prefix cache. A request that has already ended is left unchanged.
        Raises BadRequest for a number that submit() has not given, and for another reason.
        """
        if reason not in get_args(FinishReason):
            raise BadRequest(f"reason is {reason!r}; it must be one of {', '.join(get_args(FinishReason))}")
        if number not in range(self._num_submitted):
            raise BadRequest(
                f"there is no request {number!r}; submit() has returned the numbers below {self._num_submitted}"
            )
        output = self._outputs.get(number)
        if output is not None:
            self._scheduler.drop(output.sequence)
            output.end_early(reason, "", self._events)
            self._end(output)
            self.metrics.aborts += reason == "abort"

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: no later request uses pages that were stored before.

        Call it after a change of the weights in place. Requests that run go on over the K and V that they have, and
        leave no page to others.
        """
        self.settle()
        self._scheduler.forget_pages()

    def settle(self) -> None:
        """Waits until no step runs on the device. The next step() returns the events of the last one.

        Call it between two steps, before changing anything that a running step might read.
        """
        while self._pending:
            self._read_oldest()
            self._publish_read()

    def cancel(self, number: int) -> None:
        """Forgets a request, finished or not. Its pages are freed as by abort(), and it has no further event.

        Does nothing if an interrupt or an error has made the engine unusable.
        """
        if self._is_broken:
            return
        output = self._outputs.pop(number, None)
        if output is not None:
            self._scheduler.drop(output.sequence)
            self._masks.drop(number)
            self.metrics.note_end("cancelled", output.seconds, output.num_tokens)
        if not self._scheduler.has_work:
            self.settle()  # no step() may come after it
        self._done.pop(number, None)
        self._events = [event for event in self._events if event.request != number]

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that this engine can never serve."""
        self.limits.check(request)

    def can_prepare(self, request: Request) -> bool:
        """True if is_prepared() may start to compile the request's constraint: few enough others compile or wait.

        True also for a constraint whose compile has started before. Raises BadRequest.
        """
        require_kind("the request", request, Request, BadRequest)
        if request.constraint is None or self._matching is None:
            return True
        return self._matching.has_room(request.constraint, request.stop_token_ids)

    def is_prepared(self, request: Request) -> bool:
        """True if submit() can take the request without delay. If not, this call starts the work in another thread.

        That thread compiles a new constraint, while steps go on. Raises BadRequest, like submit().
        """
        self.check(request)
        if request.constraint is None or self._matching is None:
            return True
        return self._matching.is_ready(request.constraint, request.stop_token_ids)

    def prepare_constraints(self) -> None:
        """Loads the constraint library, so that the first request with a constraint does not wait a second for it.

        Raises BadRequest if this engine cannot serve constraints.
        """
        library()
        if self._matching is None:
            raise BadRequest("the model has no tokenizer, which constraints need")
        self._matching.prepare()

    def step(self) -> list[Event]:
        """Runs one step; returns its events. Call it only if has_work.

        When the last request is done it waits for the device, so that a fault of the last steps is reported too.
        Raises DeviceFault, unless the fault is contained. The affected requests have then failed, including those that
        had ended but were not reported yet; the next step() returns their events, and serves the others.

        generate() delays Ctrl-C to the end of a step. A KeyboardInterrupt within a step makes the engine unusable: it
        raises WrongState from then on. So does an exception, such as a MemoryError, while a step's tokens are noted;
        after any other one the next step() goes on.
        """
        self._require_whole()
        self._is_in_step = True
        try:
            if not self._events:
                self._advance()
            if not self._scheduler.has_work:
                self.settle()
                self._check_device()
        except DeviceFault as fault:
            self._take_in(fault)
            if not fault.is_contained:
                self._is_in_step = False
                raise
        except Exception:
            self._is_in_step = False
            raise
        self._is_in_step = False
        events, self._events = self._events, []
        return events

    def probe_truth(self, seed: int) -> TruthVerdict:
        """Checks that the layers read the right tokens, by a probe in a free row, between two steps; see truth/live.py.

        No request is changed. If the device reports faults of earlier steps, their requests fail first.
        """
        self.settle()
        try:
            self._check_device()
        except DeviceFault as fault:
            self._take_in(fault)
        return LiveTruth(self.runtime, self._scheduler.make_room, self.options.chunk, self._evidence).run(seed)

    def completion(self, number: int) -> Completion:
        """Returns the completion of a finished request, and forgets it. Raises BadRequest if there is none."""
        if number not in self._done:
            raise BadRequest(f"request {number} has no completion: it goes on, was handed over, or was never submitted")
        return self._done.pop(number)

    def generate(self, requests: Many[Request], on_event: Callable[[Event], None] | None = None) -> list[Completion]:
        """Serves requests to their end; returns their completions in the given order.

        Requests that submit() has queued are served too: step() then returns none of their events.

        on_event: called with every new token, failure and abort, as they come. It may call submit(), abort(), and
                  cancel(): the completion then has no tokens, and the finish reason "abort"
        Raises BadRequest before anything runs if one of them can never be served. If one has failed, raises
        RequestsFailed, or RequestsFaulted (a DeviceFault) after a device fault; either has all completions, and the
        other requests were served to their end. After any other exception the engine has forgotten these requests.
        Raises WrongState while another generate() of this engine runs, as in on_event.
        """
        return serve_all(self, requests, on_event)

    def report(self) -> Report:
        """The engine's kernels, pools and settings, and its metrics so far."""
        metrics = self._runner.counters.snapshot(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            compiles_after_start=compile_watch().num_compiled - self._num_compiled,
            compile_seconds=compile_watch().seconds,
        )
        return report_of(self.runtime, self._loaded, self._sizes, self._measured, self._speculative_in_words, metrics)

    @property
    def _is_broken(self) -> bool:
        """True if a step was ended halfway, so that which tokens requests have is unknown."""
        return self._is_in_step or self._scheduler.changes.are_halfway

    def _require_whole(self) -> None:
        if self._is_broken:
            raise WrongState(
                "an interrupt or an error has ended a step of this engine halfway; make another engine, and let Ctrl-C "
                "wait for the end of a step, as generate() does"
            )

    def _advance(self) -> None:
        """Launches a step, and notes the events of those before it. Raises DeviceFault.

        The next step may depend on tokens that were not read yet; then no step is launched.
        """
        if self._is_launching:  # a launch that raised may have overwritten the tokens of the step before it
            self._is_launching = False
            self.settle()
        if self._speculative_steps.goes_on(self._scheduler):
            self._go_on()
            return
        if self.options.speculates:  # drafts need the tokens before; they are published while the next step runs
            # A text may end its request when it is published, and a later round then has tokens of it.
            while len(self._pending) > 1:
                self._read_oldest()
                self._publish_read()
            # There had been no room for the most tokens of all rounds.
            if self._speculative_steps.goes_on(self._scheduler):
                self._go_on()
                return
            while self._pending:
                self._read_oldest()
            if self._speculative_steps.end():
                self._publish_read()
                self._check_device()
        while len(self._pending) > self._steps_ahead:  # the last step() could not read it
            self._read_oldest()
        try:
            if not self._scheduler.has_work:
                return
            started = time.perf_counter()
            drafts, has_held = NO_SEQUENCE, self._masks.hold()
            if self.options.speculates:
                drafts = self._speculation.drafts(self._scheduler.decoding, self._outputs.keys())
            step = self._scheduler.next_step(drafts)
            if step is None:
                if self._pending:
                    self.settle()
                else:
                    self._masks.wait()
                return
            self._is_launching = True
            picks, prompts = self._run(step)
            if not has_held:  # its turn comes with the next step
                picks = self._speculative_steps.begin(step, picks, self._scheduler)
            launched = time.perf_counter()
        finally:
            self._publish_read()
        if step.is_of_a_suspect:
            self._check_device()  # before it gets a token, and before others run again
        self.settle()
        number = self.runtime.faults.step_number
        with self._scheduler.changes:
            self._pending.append(PendingStep(step, number, picks, started, launched, prompts))
            self._is_launching = False
            self._scheduler.launched(step, picks.left_out)
        # Accepted tokens of a tree are moved before the sequence's pages may be given back.
        while len(self._pending) > (0 if step.is_of_a_suspect or step.has_trees else self._steps_ahead):
            self._read_oldest()
        self._publish_read()

    def _go_on(self) -> None:
        """Launches a round that follows from the one before; earlier rounds are read and published meanwhile."""
        started = time.perf_counter()
        self._must_check = True
        step, picks = self._speculative_steps.launch()
        launched = time.perf_counter()
        with self._scheduler.changes:
            self._pending.append(PendingStep(step, self.runtime.faults.step_number, picks, started, launched))
            if len(self._pending) == 1:
                self._scheduler.launched_again(step)
        while len(self._pending) > self._pace.num_ahead * self._steps_ahead:
            self._read_oldest()
            self._publish_read()

    def _read_oldest(self) -> None:
        """Waits for the tokens of the oldest unread step; they are to be published."""
        pending = self._pending[0]
        step, batch = pending.step, pending.step.batch
        with self._watch.watch(f"a launched step ({batch.num_seqs} sequences, {batch.num_tokens} tokens)"):
            picks = pending.picks.read()
        now = time.perf_counter()
        logprobs, prompts = pending.picks.logprobs(), pending.prompts.read()
        with self._scheduler.changes:
            del self._pending[0]
            appended = self._scheduler.finish_step(step, picks)
            self._read.append(ReadStep(pending, picks, appended, now, logprobs, prompts))
            self._masks.ask()
            if self._pending:
                self._scheduler.launched_again(self._pending[0].step)
            self._speculation.follow(step, appended)

    def _publish_read(self) -> None:
        """Notes the events of steps that were read."""
        while self._read:
            with self._scheduler.changes:
                self._publish_step(self._read.pop(0))

    def _publish_step(self, read: ReadStep) -> None:
        """Notes the events of a step that was read."""
        pending, picks, appended, read_at, emitted, prompts = read
        for part in prompts:
            self._take_prompt_part(part, pending)
        picking, new, reasons = pending.step.picking, appended.token_ids, appended.reasons
        outputs, events, before = self._outputs, self._events, len(self._events)
        for place, (sequence, token_ids) in enumerate(zip(picking, new, strict=True)):
            output = outputs.get(sequence.number)
            if output is None or not token_ids:
                continue
            reason = reasons.get(place)
            if output.take(token_ids, reason, emitted.get(place, ()) if emitted else (), events):
                if reason is None:  # only its text ends it
                    self._scheduler.drop(sequence)
                self._recent.leave(sequence.number, pending.number, pending.picks.speculative_step_number)
                self._end(output)
        self.metrics.new_tokens += len(events) - before
        for place, why in picks.failed.items():
            number = picking[place].number
            output = outputs.get(number)
            if output is not None and place in reasons:  # else it had ended before
                self._recent.leave(number, pending.number, pending.picks.speculative_step_number)
                output.is_own_fault = isinstance(why, NothingAllowed)
                self._fail(number, str(why))
        self._compared.note(new)
        got = [sequence.times for sequence in compress(picking, new)]
        seconds = self._times.note(pending.started, pending.launched, got, sum(map(len, new)), read_at)
        if pending.picks.speculative_step_number != NO_ROUND:
            self._pace.note(seconds)

    def _take_prompt_part(self, part: PromptPart, pending: PendingStep) -> None:
        """Notes logprobs of a prompt. Its request fails if a token has none."""
        number, first = part.sequence.number, part.first
        output = self._outputs.get(number)
        if output is None:
            return
        output.take_prompt(first, part.words)
        places = np.isnan(part.words[:, 0].view(np.float32)).nonzero()[0].tolist()
        if places:
            self._scheduler.fail(output.sequence)
            self._recent.leave(number, pending.number, pending.picks.speculative_step_number)
            self._fail(
                number,
                f"the logits before token {first + places[0]} of the prompt hold NaN or infinity, so its tokens have "
                "no logprobs; look for weights that are too large for the dtype, or use a wider one (float32)",
            )

    def _check_device(self) -> None:
        """Waits for the device if a step has run since the last wait. Raises DeviceFault."""
        if self._must_check:
            self._must_check = False
            self._runner.check_device()
            self._scheduler.all_is_right()

    def _run(self, step: ScheduledStep) -> tuple[StepPicks, ComingPromptLogprobs]:
        """Launches a step, the kernels that pick its tokens, and those that find logprobs of its prompts."""
        before, batch = self.runtime.faults.step_number, step.batch
        self._must_check = True
        self._compared.before_step(batch.kv_len, batch.q_len, batch.token_ids)
        prompts, rows = NO_PROMPT_LOGPROBS, self._prompts.rows(step, self._outputs.keys())
        try:
            if rows:
                with self._watch.watch(f"a step with logprobs of {len(rows)} prompts ({batch.num_tokens} tokens)"):
                    logits, prompts = self._prompts.run(self._speculation.batch(step), rows)
            else:
                logits = self._steps.run(self._speculation.batch(step))
        finally:
            self._recent.note(before, self.runtime.faults.step_number, step.sequences)
        return self._speculation.pick(step, logits, self.settle, self._masks), prompts

    def _end(self, output: Output) -> None:
        """Notes the completion of a request that has ended and is no longer served."""
        number = output.sequence.number
        self._done[number] = output.completion()
        self._outputs.pop(number, None)
        self._masks.drop(number)
        assert output.reason is not None
        self.metrics.note_end(output.reason, output.seconds, output.num_tokens)

    def _fail(self, number: int, error: str) -> None:
        """Notes that a request has failed. Its sequence has left the scheduler, or the request had ended before."""
        output = self._outputs.get(number)
        if output is None:
            self._done[number] = replace(self._done[number], finish_reason="error", error=error)
            self._events.append(FailureEvent(number, "", error))
        else:
            output.end_early("error", error, self._events)
            self._end(output)

    def _take_in(self, fault: DeviceFault) -> None:
        """Fails a fault's requests that were not handed over; those of a contained fault become suspects first."""
        self.settle()
        faults = [fault, *self._more_faults()]
        self._scheduler.forget_unknown_pages()
        # Several of these faults may belong to steps before a sequence became suspect: being alone then shows nothing.
        were_alone = {number for number, output in self._outputs.items() if output.sequence.is_suspect}
        for found in (one for fault in faults for one in fault.each):
            concerned = self._recent.requests_in(found.step, self._speculative_steps.first_fault_of(found.step))
            if concerned is None:
                self._scheduler.forget_pages()
            for number in self._have_run() if concerned is None else sorted(concerned):
                output, done = self._outputs.get(number), self._done.get(number)
                if output is not None and found.is_contained and number not in were_alone:
                    self._scheduler.suspect(output.sequence)
                    continue
                if output is not None:
                    self._scheduler.fail(output.sequence)
                if output is not None or (done is not None and not done.error):
                    self._fail(number, str(found))

    def _more_faults(self) -> list[DeviceFault]:
        """Further faults that the device has to report, read now so that later requests do not get them."""
        faults: dict[int | None, DeviceFault] = {}
        while True:
            try:
                self.runtime.check_device()
            except DeviceFault as fault:
                if fault.step in faults:  # a lasting fault, such as one of page 0
                    break
                faults[fault.step] = fault
                self.metrics.faults += len(fault.each)
            else:
                break
        return list(faults.values())

    def _have_run(self) -> list[int]:
        """Requests that have been in a step and were not handed over."""
        sequences = [output.sequence for output in self._outputs.values()]
        begun = [sequence.number for sequence in sequences if sequence.num_stored or sequence.new_token_ids]
        return sorted([*begun, *self._done])
