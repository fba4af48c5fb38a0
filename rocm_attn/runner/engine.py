"""Engine: requests in, tokens out. Owns the runtime, the model, and the loop around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import chain

from rocm_attn.capture.check import CaptureCheck
from rocm_attn.capture.graphs import CaptureReport, Progress, eager_steps_before_capture, recorder_for
from rocm_attn.capture.split_forward import Forward
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadLogits, BadRequest, DeviceFault
from rocm_attn.runner.asking_picker import AskingPicker
from rocm_attn.runner.asks import asks_of
from rocm_attn.runner.compared import Compared
from rocm_attn.runner.constraint import library
from rocm_attn.runner.engine_runtime import model_over, runtime_for
from rocm_attn.runner.events import Events, NewTokens, without
from rocm_attn.runner.limits import RequestLimits
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.logprobs import TokenLogprobs
from rocm_attn.runner.matching import matching_of
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.output import Output
from rocm_attn.runner.prefix_cache import CachedRow
from rocm_attn.runner.recent_steps import RecentSteps
from rocm_attn.runner.report import Report
from rocm_attn.runner.request import (
    Completion,
    Event,
    FailureEvent,
    FinishReason,
    Request,
    Sequence,
)
from rocm_attn.runner.request_times import note_tokens
from rocm_attn.runner.sampling import Sampler, TokenPicker
from rocm_attn.runner.scheduler import ScheduledStep, Scheduler
from rocm_attn.runner.serving import serve_all
from rocm_attn.runner.speculation.engines import (
    drafter_of,
    guesses_of,
    layers_beside,
    read_drafting,
    rejection_of,
    served,
)
from rocm_attn.runner.speculation.following import NoRounds, Rounds
from rocm_attn.runner.speculation.last_rows import forward_of
from rocm_attn.runner.speculation.reading import MOST_AHEAD, Pace, Together
from rocm_attn.runner.speculation.rounds import FOLLOWING, DeviceRounds, why_no_rounds
from rocm_attn.runner.speculation.speculation import Drafter, NoSpeculation, Speculation, StepPicks
from rocm_attn.runner.taking import Taken
from rocm_attn.runner.unread import FoundPicks, ReadRounds, ReadStep, UnreadStep, with_unread_tokens
from rocm_attn.runner.watched import watched_steps
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER
from rocm_attn.watch.flight_recorder import FlightRecorder


class Engine:
    """Serves requests with one model, many at a time.

    submit() queues a request, step() runs all of them one step further; generate() does both until all are done.

    With options.steps_ahead a step is scheduled and launched while the one before it runs, and the tokens of that one
    are read afterwards; where tokens are guessed, they are read first, and published afterwards. The tokens are the
    same; step() returns them one step later, and settle() reads those that are
    left.

    What goes wrong with one request ends that request alone: its Completion says why, and the others go on. A fault of
    the device ends the requests that were in its step, and all that have run where that step is not known; what it
    leaves in the queue is served by the steps after it. Where only some of the step's requests can be wrong, and the
    others were not harmed (K or V that was infinite or no number), each is computed again alone, and those that show
    the fault again end. Pages that such a step may have written leave the prefix cache.

    abort() ends a request early and says what it came to, cancel() leaves no trace of it. Both may be called between
    two steps, and by the on_event of generate().

    Raises Unsupported when no kernel serves the model's layers, CapacityExceeded for a pool that cannot be.
    """

    def __init__(self, loaded: LoadedModel, options: EngineOptions | None = None) -> None:
        self._loaded = loaded
        self._has_ranks = loaded.ranks.shard.num_ranks > 1
        self.options = options = options if options is not None else EngineOptions()
        drafting = read_drafting(loaded, options)
        self.runtime, self._measured = runtime_for(loaded, options, layers_beside(drafting))
        self.max_kv_len = self.runtime.max_kv_len
        self.limits = RequestLimits(
            loaded.config.context_len, self.max_kv_len, loaded.config.vocab_size, loaded.tokenizer is not None
        )
        path = options.flight_record
        model = served(model_over(self.runtime, loaded, options), drafting, options, self.runtime)
        self._steps_ahead = options.steps_ahead_on(self.runtime.device.type)
        ops, most = self.runtime.core.ops, options.max_batch_size
        plain = TokenPicker(self.runtime.device, most * options.rows_of_each, ops.pick_rows)
        self._picker = AskingPicker(plain, ops, loaded.config.vocab_size, most)
        self._matching = matching_of(loaded)
        forward = forward_of(model, options)
        if self._steps_ahead and not options.speculates:
            forward = with_unread_tokens(forward, plain.tokens)
        self.flight = FlightRecorder(self.runtime, path) if path is not None else NO_FLIGHT_RECORDER
        watched = watched_steps(self.runtime, forward, options, self.flight, self._new_runner)
        self._runner, self._steps, self._watch = watched
        self.metrics = self._runner.metrics
        # What looks on at single steps wants them one by one.
        looks_on = self._steps is not self._runner or path is not None
        host_plans = why_no_rounds(options, looks_on=looks_on)
        self._rounds_in_words = f"planned by the host: {host_plans}" if host_plans else FOLLOWING
        has_rounds = options.speculates and not host_plans
        self._speculation: Speculation | NoSpeculation = NoSpeculation(self._picker)
        self._rounds: Rounds = NoRounds()
        if options.speculates:
            self._speculate(drafter_of(drafting, loaded, options, self.runtime, model), has_rounds=has_rounds)
        self._scheduler = Scheduler(
            self.runtime.table,
            self.metrics,
            max_batch_size=options.max_batch_size,
            chunk=options.chunk_on(self.runtime.device.type),
            max_kv_len=self.max_kv_len,
            steps_until_known=self.runtime.faults.steps_until_known,
        )
        self._outputs: dict[int, Output] = {}
        self._done: dict[int, Completion] = {}
        self._events: list[Event | NewTokens] = []  # that no step() has returned yet
        self._must_check = False  # whether a step has run since the device was waited for
        self._recent, self._pace = RecentSteps(), Pace()
        self._unread: list[UnreadStep] = []  # oldest first
        self._is_launching = False  # whether a step is launched, and not among them yet
        self._found: FoundPicks | None = None
        self._read: list[ReadStep | ReadRounds] = []  # whose tokens are to be published, oldest first
        self._read_at = 0.0  # when tokens were read last
        self._rounds_to_enter: ScheduledStep | None = None  # whose pages prompts cannot find yet
        self._compared = Compared(self.runtime.faults.meetings, has_ranks=self._has_ranks)
        self._num_submitted = 0
        # Of a request that is aborted, or else cancelled: an interrupt may leave it dropped by half.
        self._leaving: tuple[Output, bool] | None = None

    def _speculate(self, drafter: Drafter, *, has_rounds: bool) -> None:
        """Have drafts before each step. has_rounds: whether rounds may follow from each other"""
        options, most, runtime = self.options, self.options.draft_tokens, self.runtime
        self._speculation = Speculation(
            drafter,
            runtime,
            self._picker,
            most,
            self.metrics,
            rejection_of(drafter, options),
            has_rounds=has_rounds,
            branches=has_rounds and options.topk > 1,
        )
        if has_rounds:
            guesses, most_ahead = guesses_of(drafter, options, runtime), MOST_AHEAD * self._steps_ahead
            self._rounds = DeviceRounds(
                runtime, self._runner, self._picker, guesses, most, most_ahead, ranks=self._loaded.ranks
            )

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
        """Whether any request is not finished, or an event was not returned yet: then step() may be called."""
        is_halfway = bool(self._read) or self._found is not None or self._leaving is not None  # by an interrupt
        return self._scheduler.has_work or bool(self._events) or is_halfway

    def capture_all(self, progress: Progress) -> CaptureReport:
        """Make every graph before the first request arrives, so that no request waits for one.

        Cached prefixes are forgotten: graphs are checked on pages that are free.
        progress: as StepRunner.capture_all
        """
        self.forget_prefixes()
        started = time.perf_counter()
        try:
            self._speculation.capture_all(progress)
            return self._runner.capture_all(progress)
        finally:
            self.metrics.seconds += time.perf_counter() - started

    def submit(self, request: Request) -> int:
        """Queue a request; its number. Raises BadRequest, and nothing else is touched then."""
        self.check(request)
        matcher = None
        if request.constraint is not None:
            assert self._matching is not None, "check() refuses it"
            matcher = self._matching.matcher(request.constraint, request.stop_token_ids)
        number = self._num_submitted
        self._num_submitted += 1
        self.metrics.requests += 1
        self.metrics.prompt_tokens += len(request.prompt_token_ids)
        stops = frozenset(request.stop_token_ids + (() if request.ignore_eos else self._loaded.config.eos_token_ids))
        sequence = Sequence(
            number=number,
            request=request,
            stops=stops,
            sampler=Sampler(request.sampling),
            token_ids=list(request.prompt_token_ids),
            cached_row=CachedRow(request.cache_salt, is_cached=self.options.prefix_caching and request.prefix_caching),
            asks=asks_of(request, stops, matcher),
        )
        self._outputs[number] = Output(sequence, self._loaded.tokenizer)
        self._scheduler.add(sequence)
        return number

    def abort(self, number: int) -> None:
        """End a request that waits or runs. It comes to what it has so far, with finish_reason "abort".

        The next step() returns an AbortEvent, and its completion() can be had. Its pages are free again, or stay in the
        prefix cache. Nothing happens to a request that has ended: it may have done so while the call was on its way.
        Raises BadRequest for a number that submit() has not given.
        """
        if not 0 <= number < self._num_submitted:
            raise BadRequest(
                f"there is no request {number}; submit() has given the numbers below {self._num_submitted}"
            )
        self._publish_read()  # an interrupt may have left tokens that were read and not published
        self._enter_rounds()
        output = self._outputs.get(number)
        if output is None:
            return
        self._leaving = output, True
        self._drop_leaving()
        self.metrics.aborts += 1

    def _drop_leaving(self) -> None:
        """Drop the request that is aborted or cancelled, if one is. After an interrupt it is called again."""
        if self._leaving is None:
            return
        output, is_aborted = self._leaving
        self._scheduler.drop(output.sequence)
        if is_aborted:
            output.end_early("abort", "", self._events)
            self._end(output)
        else:
            self._outputs.pop(output.sequence.number, None)
        self._leaving = None

    def forget_prefixes(self) -> None:
        """Begin with an empty prefix cache: no request that comes later finds pages that were stored so far.

        Call it where weights were changed in place, while no request runs.
        """
        self.settle()
        self._scheduler.forget_pages()

    def settle(self) -> None:
        """Wait until no step runs. What came of the last one is returned by the next step().

        To be called between two steps before something is changed that a step which still runs might see.
        """
        self._publish_read()
        while self._unread:
            self._read_oldest()
            self._publish_read()
        self._enter_rounds()

    def cancel(self, number: int) -> None:
        """Forget a request, finished or not: its pages are given back as by abort(), and nothing more comes of it."""
        self._publish_read()  # as in abort()
        self._enter_rounds()
        output = self._outputs.get(number)
        if output is not None:
            self._leaving = output, False
            self._drop_leaving()
            self.metrics.note_end("cancelled", output.seconds)
        if not self._scheduler.has_work:
            self.settle()  # no step() may come after it
        self._done.pop(number, None)
        self._events = without(self._events, number)

    def check(self, request: Request) -> None:
        """Raise BadRequest for a request that this engine can never serve."""
        self.limits.check(request)

    def can_prepare(self, request: Request) -> bool:
        """Whether there is room for what is_prepared() may begin: few enough constraints are compiled or wait for it.

        One that was begun before needs no room. Raises BadRequest.
        """
        if request.constraint is None or self._matching is None:
            return True
        return self._matching.has_room(request.constraint, request.stop_token_ids)

    def is_prepared(self, request: Request) -> bool:
        """Whether submit() takes a request at once. If not, what it would wait for runs in another thread by now.

        A constraint that is new is compiled there, while steps go on. Raises BadRequest, as submit().
        """
        self.check(request)
        if request.constraint is None or self._matching is None:
            return True
        return self._matching.is_ready(request.constraint, request.stop_token_ids)

    def prepare_constraints(self) -> None:
        """Make ready for requests with constraints, so that the first one does not wait a second for it.

        Raises BadRequest where this engine can serve none.
        """
        library()
        if self._matching is None:
            raise BadRequest("the model came without a tokenizer, which constraints need")
        self._matching.prepare()

    def step(self) -> Events:
        """Run one step; what came of it. There must be work.

        When the last request is done it waits for the device, so that a fault of the last steps is reported too.
        Raises DeviceFault, unless it is contained. The requests concerned have failed then, those included that had
        ended and were not handed over yet; the next step() returns their events, and goes on with the others.
        """
        try:
            if not self._events:
                self._advance()
            if not self._scheduler.has_work:
                self.settle()
                self._check_device()
        except DeviceFault as fault:
            self._take_in(fault)
            if not fault.is_contained:
                raise
        events, self._events = self._events, []
        return Events(events)

    def completion(self, number: int) -> Completion:
        """Hand over what a finished request came to; the engine forgets it."""
        return self._done.pop(number)

    def generate(self, requests: Many[Request], on_event: Callable[[Event], None] | None = None) -> list[Completion]:
        """Serve requests to their end, in the order given.

        on_event: called with every new token as it comes, and with every failure and abort; it may call abort()
        Raises BadRequest before anything runs when one of them cannot be served. Raises RequestsFailed, which holds all
        completions, when one of them has failed, and RequestsFaulted (a DeviceFault) when the device had a fault; the
        others were served to their end. After any other exception the engine has forgotten these requests.
        """
        return serve_all(self, requests, on_event)

    def report(self) -> Report:
        """What this engine runs on, and how it went so far."""
        runtime, scheduler = self.runtime, self._scheduler
        metrics = self._runner.counters.snapshot(running=scheduler.num_running, waiting=scheduler.num_waiting)
        graphs = f"off: {metrics.graphs_off}" if metrics.graphs_off else "on" if self.options.graphs else "off"
        return Report(
            provider=runtime.selections[0].provider,
            kernels=tuple(dict.fromkeys(line for selection in runtime.selections for line in selection.lines())),
            device=str(runtime.device),
            arch=runtime.target.arch,
            dtype=str(self._loaded.weights.dtype).removeprefix("torch."),
            page_size=runtime.pool.page_size,
            pools=tuple(dict.fromkeys(selection.problem.pool.value for selection in runtime.selections)),
            num_pages=runtime.pool.num_pages,
            swa_pages=runtime.options.swa_pages,
            weights_bytes=self._loaded.weights.num_bytes,
            step_bytes=self._measured.step,
            graph_bytes=self._measured.graph,
            kv_bytes=runtime.pool.num_bytes,
            max_kv_len=self.max_kv_len,
            max_batch_size=self.options.max_batch_size,
            chunk=self.options.chunk_on(runtime.device.type),
            graphs=graphs,
            rounds=self._rounds_in_words if self.options.speculates else "",
            deterministic=self.options.deterministic,
            ranks=self._loaded.ranks.shard.num_ranks,
            cost_of_ranks=self._loaded.cost,
            guards_off=runtime.guards.off,
            metrics=metrics,
        )

    def _advance(self) -> None:
        """Launch a step, and note the events that came out of those before it. Raises DeviceFault.

        What comes next may depend on tokens that were not read yet; then no step is launched.
        """
        if self._is_launching:  # what an interrupt has left may have written over the tokens of the step before it
            self._is_launching = False
            self.settle()
        self._publish_read()  # what an interrupt has left
        if self._rounds.goes_on(self._scheduler):
            self._go_on()
            return
        if self.options.speculates:  # by the tokens before; they are published while the next step runs
            # A text may end its request as it is published, and a round after that has tokens of it.
            while len(self._unread) > 1:
                self._read_rounds(len(self._unread) - 1)
            if self._rounds.goes_on(self._scheduler):  # there was no room for as many tokens as all might have brought
                self._go_on()
                return
            self._enter_rounds()
            self._read_all()
            if self._rounds.end():
                self._publish_read()
                self._check_device()
        try:
            if not self._scheduler.has_work:
                return
            started = time.perf_counter()
            step = self._scheduler.next_step(self._speculation.drafts(self._scheduler.decoding, self._outputs.keys()))
            if step is None:
                self.settle()
                return
            self._is_launching = True
            picks = self._run(step)
            if self._speculation.has_rounds:
                picks = self._rounds.begin(step, picks, self._scheduler)
            launched = time.perf_counter()
        finally:
            self._publish_read()
        if step.is_of_a_suspect:
            self._check_device()  # before it gets a token, and before others run again
        self.settle()
        # First: an interrupt may leave a step that the scheduler has not noted. Of that one sequences take nothing.
        self._unread.append(UnreadStep(step, self.runtime.faults.step_number, picks, started, launched))
        self._is_launching = False
        self._scheduler.launched(step)
        self._rounds.noted()
        # What was accepted of a tree is moved before its sequence's pages may be given back.
        moves = step.has_trees and not picks.is_followed
        while len(self._unread) > (0 if step.is_of_a_suspect or moves else self._steps_ahead):
            self._read_oldest()
        self._publish_read()

    def _go_on(self) -> None:
        """Launch a round that follows from the one before; those before that are read and published meanwhile."""
        started = time.perf_counter()
        self._must_check = True
        self._compared.before_step()
        step, picks = self._rounds.launch()
        launched = time.perf_counter()
        self._unread.append(
            UnreadStep(step, self.runtime.faults.step_number, picks, started, launched)
        )  # first, as above
        if len(self._unread) == 1:
            self._scheduler.launched_again(step)
        self._rounds.noted()
        while len(self._unread) > self._pace.num_ahead * self._steps_ahead:
            self._read_rounds(self._pace.num_together)

    def _read_rounds(self, most: int) -> None:
        """Wait for the oldest rounds, `most` of them, and publish their tokens: together, where none of them is odd."""
        unread = self._unread
        with self._watch.watch(f"{len(unread)} rounds that were launched ({unread[0].step.num_picks} sequences)"):
            together = self._rounds.read_together([each.picks for each in unread], most, self._scheduler)
        if together is None:
            self._read_oldest()
            self._publish_read()
            return
        self._read.append(ReadRounds(unread[: together.num_rounds], together, time.perf_counter()))
        self._publish_read()

    def _take_rounds(self, rounds: Many[UnreadStep], together: Together) -> None:
        """Have sequences take what rounds have brought that were read together: once, however often it is called."""
        if self._unread and self._unread[0] is rounds[0]:
            del self._unread[: len(rounds)]
        step = self._rounds_to_enter = rounds[0].step
        self._scheduler.take_together(step, together.first, together.token_ids, all_read=not self._unread)
        self._rounds.took(together)

    def _publish_rounds(self, read: ReadRounds) -> None:
        """As _publish_read, of rounds that were read together. After an interrupt it is called again, and goes on.

        What is counted comes last: it is all that an interrupt may leave out.
        """
        rounds, together, read_at = read
        self._take_rounds(rounds, together)
        sequences = rounds[0].step.picking
        if self._loaded.tokenizer is None:  # there is no text, which could end one
            for sequence in sequences:
                self._outputs[sequence.number].num_tokens = sequence.num_read
            new = NewTokens([sequence.number for sequence in sequences], together.token_ids)
            # One statement: an interrupt leaves them to be published, or published.
            self._events, self._read = [*self._events, new], self._read[1:]
            self.metrics.new_tokens += together.num_tokens
            self._compared.note(chain.from_iterable(together.token_ids))
        else:
            for sequence in sequences:
                self._publish_rest(sequence, rounds[-1])
            del self._read[0]
        self._speculation.count_rounds(rounds[0].step, together)
        seconds = self._note_rounds(rounds, together, read_at)
        if not self._has_ranks:  # whose clocks differ
            self._pace.note(seconds, len(rounds))

    def _publish_rest(self, sequence: Sequence, unread: UnreadStep) -> None:
        """Publish the tokens of a sequence that were not, as of a step, if it has not ended."""
        output = self._outputs.get(sequence.number)
        if output is not None:
            self._publish(output, sequence.new_token_ids[output.num_tokens :], None, (), unread)

    def _note_rounds(self, rounds: Many[UnreadStep], together: Together, now: float) -> float:
        """As _note_times, of rounds that were read together; the seconds that they took."""
        metrics, num = self.metrics, together.num_rounds
        seconds = now - max(rounds[0].started, self._read_at)
        self._read_at = now
        metrics.seconds += seconds
        metrics.step_seconds.note(seconds / num, num)
        for each in rounds:
            metrics.host_seconds.note(each.launched - each.started)
        sequences = rounds[0].step.picking
        note_tokens([sequence.times for sequence in sequences], now, metrics)
        if together.num_tokens > len(sequences):
            metrics.token_gap_seconds.note(0.0, together.num_tokens - len(sequences))
        return seconds

    def _enter_rounds(self) -> None:
        """Let prompts find what rounds have stored that were read together."""
        step, self._rounds_to_enter = self._rounds_to_enter, None
        if step is not None:
            self._scheduler.enter_rounds(step)

    def _read_all(self) -> None:
        while self._unread:
            self._read_oldest()

    def _read_oldest(self) -> None:
        """Wait for the tokens of the oldest step that was not read; they are to be published."""
        self._enter_rounds()
        unread = self._unread[0]
        batch = unread.step.batch
        with self._watch.watch(f"a step that was launched ({batch.num_seqs} sequences, {batch.num_tokens} tokens)"):
            picks = unread.picks.read()
        self._found = FoundPicks(unread, picks, time.perf_counter())
        self._take_found(self._found)

    def _take_found(self, found: FoundPicks) -> None:
        """Have sequences take what a step has brought that was read: once, however often it is called."""
        unread = found.unread
        if self._unread and self._unread[0] is unread:
            del self._unread[0]
        taken = self._scheduler.finish_step(unread.step, found.picks)
        if self._unread:
            self._scheduler.launched_again(self._unread[0].step)
        self._speculation.follow(unread.step, taken, is_followed=unread.picks.is_followed)
        read = ReadStep(found, taken, unread.picks.logprobs())
        # One statement: an interrupt leaves them to be taken, or taken.
        self._found, self._read = None, [*self._read, read]

    def _publish_read(self) -> None:
        """Note the events that come out of steps that were read. After an interrupt it is called again, and goes on."""
        if self._found is not None:
            self._take_found(self._found)
        self._drop_leaving()
        while self._read:
            read = self._read[0]
            if isinstance(read, ReadRounds):
                self._publish_rounds(read)
            else:
                self._publish_step(read)

    def _publish_step(self, read: ReadStep) -> None:
        """As _publish_rounds, of a step that was read by itself."""
        (unread, picks, read_at), told = read.found, read.logprobs
        each = zip(unread.step.picking, picks, read.taken, strict=True)
        for place, (sequence, pick, (token_ids, reason, first)) in enumerate(each):
            output = self._outputs.get(sequence.number)
            if output is None:
                continue
            if token_ids:
                num_told = output.num_tokens + len(sequence.request.prompt_token_ids) - first
                self._publish(output, token_ids[num_told:], reason, told.get(place, ()) if told else (), unread)
            elif reason == "error" and isinstance(pick, BadLogits):
                self._recent.leave(sequence.number, unread.number, unread.picks.round_number)
                self._fail(sequence.number, str(pick))
        del self._read[0]
        self._note_times(unread, read.taken, read_at)

    def _note_times(self, unread: UnreadStep, taken: Many[Taken], now: float) -> None:
        """A step has run, and its sequences have their tokens; the device was not waited for when it was launched."""
        metrics = self.metrics
        seconds = now - max(unread.started, self._read_at)  # steps that overlap are not counted twice
        self._read_at = now
        metrics.seconds += seconds
        metrics.step_seconds.note(seconds)
        metrics.host_seconds.note(unread.launched - unread.started)
        got = [
            (sequence.times, len(ids)) for sequence, (ids, *_) in zip(unread.step.picking, taken, strict=True) if ids
        ]
        note_tokens([times for times, _ in got], now, metrics)
        together = sum([num for _, num in got]) - len(got)
        if together > 0:
            metrics.token_gap_seconds.note(0.0, together)

    def _check_device(self) -> None:
        """Wait for the device, if a step has run since that was done last. Raises DeviceFault."""
        if self._must_check:
            self._must_check = False
            self._runner.check_device()
            self._scheduler.all_is_right()

    def _run(self, step: ScheduledStep) -> StepPicks:
        """Launch a step, and what picks its tokens."""
        before, batch = self.runtime.faults.step_number, step.batch
        self._must_check = True
        self._compared.before_step(batch.kv_len, batch.q_len, batch.token_ids)
        try:
            logits = self._steps.run(self._speculation.batch(step))
        finally:
            self._recent.note(before, self.runtime.faults.step_number, [sequence.number for sequence in step.sequences])
        return self._speculation.pick(step, logits, self.settle)

    def _publish(
        self,
        output: Output,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: Many[TokenLogprobs],
        unread: UnreadStep,
    ) -> None:
        """Note the tokens that a request got of a step, and its end.

        token_ids: none where an interrupt has left nothing but its end
        reason:    why it ends with the last of them, as far as tokens say it
        logprobs:  of them, where the request asks for any
        """
        if token_ids and output.reason is None:
            self.metrics.new_tokens += output.take(token_ids, reason, logprobs, self._events)
            self._compared.note(token_ids)
        if output.reason is not None:
            if reason is None:  # only its text says so
                self._enter_rounds()
                self._scheduler.drop(output.sequence)
            self._recent.leave(output.sequence.number, unread.number, unread.picks.round_number)
            self._end(output)

    def _end(self, output: Output) -> None:
        """Note what a request came to, which has ended and is not served any more."""
        number = output.sequence.number
        self._done[number] = output.completion()
        self._outputs.pop(number, None)
        assert output.reason is not None
        self.metrics.note_end(output.reason, output.seconds)

    def _fail(self, number: int, error: str) -> None:
        """Note that a request has failed, whose sequence has left the scheduler; or one that had ended."""
        output = self._outputs.get(number)
        if output is None:
            self._done[number] = replace(self._done[number], finish_reason="error", error=error)
            self._events.append(FailureEvent(number, "", error))
        else:
            output.end_early("error", error, self._events)
            self._end(output)

    def _take_in(self, fault: DeviceFault) -> None:
        """Fail every request that was in the step of a fault and was not handed over; or see which are concerned."""
        self.settle()
        faults = [fault, *self._more_faults()]
        self._scheduler.forget_unknown_pages()
        # Several of these faults may be of steps before a sequence became suspect: that it is alone shows nothing yet.
        were_alone = {number for number, output in self._outputs.items() if output.sequence.is_suspect}
        for found in (one for fault in faults for one in fault.each):
            concerned = self._recent.requests_in(found.step, self._rounds.first_fault_of(found.step))
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
        """What else the device has to report, so that nothing of it is left for requests that come later."""
        faults: dict[int | None, DeviceFault] = {}
        while True:
            try:
                self.runtime.check_device()
            except DeviceFault as fault:
                if fault.step in faults:  # there to stay, such as what lies in page 0
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
