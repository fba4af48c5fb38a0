"""serve_all: serves a list of requests to their end, by any engine with submit() and step()."""

from collections.abc import Callable, Sequence

from rocm_attn.errors import BadRequest, DeviceFault, WrongState
from rocm_serve.engine_thread import ServingEngine
from rocm_serve.held_interrupts import HeldInterrupts
from rocm_serve.request import Completion, Event, Request, RequestsFailed, RequestsFaulted

# Engines that are in serve_all.
_SERVING: list[ServingEngine] = []


def serve_all(
    engine: ServingEngine, requests: Sequence[Request], on_event: Callable[[Event], None] | None
) -> list[Completion]:
    """Engine.generate for any engine."""
    requests = list(requests)  # an iterator would be at its end after the checks
    for request in requests:
        engine.limits.check(request)
    if engine in _SERVING:
        raise WrongState(
            "generate() of this engine runs, and a second one would take its events; call submit() in on_event, and "
            "from other threads use an AsyncEngine"
        )
    with HeldInterrupts() as interrupts:
        numbers: list[int] = []
        _SERVING.append(engine)
        try:
            for request in requests:
                numbers.append(engine.submit(request))  # may refuse a constraint, which only compiling shows
            faults = _served(engine, on_event, interrupts)
        except BaseException:
            for number in numbers:
                engine.cancel(number)
            raise
        finally:
            _SERVING.remove(engine)
    completions = [_completion(engine, number, request) for number, request in zip(numbers, requests, strict=True)]
    if faults:
        raise RequestsFaulted(completions, faults) from faults[0]
    if any(completion.error for completion in completions):
        raise RequestsFailed(completions)
    return completions


def _completion(engine: ServingEngine, number: int, request: Request) -> Completion:
    """The completion of a request that has ended; without tokens if on_event has cancelled it."""
    try:
        return engine.completion(number)
    except BadRequest:
        return Completion(request.prompt_token_ids, (), "", "abort")


def _served(
    engine: ServingEngine, on_event: Callable[[Event], None] | None, interrupts: HeldInterrupts
) -> list[DeviceFault]:
    """Steps until there is no work; returns the faults that the device reported meanwhile."""
    faults = []
    while engine.has_work:
        interrupts.let_through()
        try:
            events = engine.step()
        except DeviceFault as fault:
            faults.append(fault)
            continue
        for event in events:
            if on_event is not None:
                on_event(event)
    return faults
