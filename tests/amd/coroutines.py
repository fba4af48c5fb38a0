"""A conftest that takes the hook of this module runs tests that are coroutines, each in an event loop of its own."""

import asyncio
import inspect
import threading

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine of a test; afterwards no thread of an engine that it began is left."""
    test, before = pyfuncitem.obj, set(threading.enumerate())
    if not inspect.iscoroutinefunction(test):
        return None
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    assert not [thread for thread in threading.enumerate() if thread not in before and "engine" in thread.name]
    return True
