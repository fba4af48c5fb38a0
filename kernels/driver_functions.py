"""What is asked of a GPU's driver in every step, by functions of C: to launch kernels, and events of streams.

Triton's launcher takes its arguments apart in each launch, one Python object after the other, and a layer of a step
makes several launches. Here one call hands several to the driver, from bytes that were put together before, with places
for the addresses that differ from call to call (packed_launches.py). Events are torch's; to record one, or to see that
it was reached, takes the driver a fraction of what torch's own call does.

Triton builds this as it builds its own launchers, with the compiler that it needs for these. Where that fails, and
where the driver is neither CUDA's nor HIP's, everything goes by Triton and torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

# The addresses of its functions, and the device.
DRIVER = struct.Struct("=8Qq")
_NUM_FUNCTIONS = 8
# A backend of Triton -> the driver's library, and its functions in the order of DRIVER. HIP needs none for contexts.
_DRIVERS = {
    "cuda": (
        "libcuda.so",
        ("cuLaunchKernel", "cuGetErrorString", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
        ("cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
    ),
    "hip": (
        "libamdhip64.so",
        ("hipModuleLaunchKernel", "hipDrvGetErrorString", "hipEventRecord", "hipEventQuery", "hipEventSynchronize"),
        (),
    ),
}


_drivers: dict[tuple[str, int], bytes] = {}


class DriverCalls(Protocol):
    """The functions of C. driver: see driver_of(). All raise RuntimeError for what the driver refuses."""

    def launch(self, driver: bytes, stream: int, /, *records_and_addresses: bytes | tuple[int, ...]) -> None:
        """Make the launches of records, which packed_launches.py writes, in their order; then those of more records.

        records_and_addresses: bytes, and a tuple of addresses for them, as often as there are records
        """
        ...

    def record(self, driver: bytes, event: int, stream: int) -> None:
        """Put an event, by its handle, after everything that was launched on a stream."""
        ...

    def reached(self, driver: bytes, event: int) -> bool:
        """Whether the device has reached an event."""
        ...

    def wait_for(self, driver: bytes, event: int) -> None:
        """Wait until the device has reached an event."""
        ...


_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST_ADDRESSES 64
#define MOST_PARAMETERS 256
/* Errors of our own, beside the driver's, which are above 0. */
#define RAISED -1
#define TOO_MANY -2
#define NOT_RECORDS -3
#define NOT_READY 600 /* of CUDA and of HIP */

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
typedef int (*describe_t)(int, const char **);
typedef int (*record_t)(void *, void *);
typedef int (*event_t)(void *);
typedef int (*current_t)(void **);
typedef int (*retain_t)(void **, int);
typedef int (*set_t)(void *);

/* What a device's driver is asked by. Those of contexts are CUDA's alone, whose threads may have none yet. */
typedef struct {
  launch_t launch;
  describe_t describe;
  record_t record;
  event_t query, synchronize;
  current_t current_context;
  retain_t retain_context;
  set_t set_context;
  int64_t device;
} driver_record;

typedef struct {
  uint64_t function;
  uint32_t grid[3], threads, shared, num_parameters;
} launch_record;

typedef struct {
  uint64_t value;
  int64_t place;
} parameter_record;

static int enter_context(const driver_record *driver) {
  void *context = NULL;
  if (!driver->current_context)
    return 0;
  int error = driver->current_context(&context);
  if (error || context)
    return error;
  error = driver->retain_context(&context, (int)driver->device);
  return error ? error : driver->set_context(context);
}

static const driver_record *driver_in(PyObject *given) {
  if (PyBytes_Check(given) && PyBytes_GET_SIZE(given) == sizeof(driver_record))
    return (const driver_record *)PyBytes_AS_STRING(given);
  PyErr_SetString(PyExc_TypeError, "the driver is not what driver_of() gave");
  return NULL;
}

static PyObject *refused(const driver_record *driver, int error) {
  const char *what = NULL;
  if (!driver->describe || driver->describe(error, &what) || !what)
    what = "of which the driver says no more";
  return PyErr_Format(PyExc_RuntimeError, "the GPU's driver refused a call with error %d: %s", error, what);
}

/* Make the launches of records; the driver's error, or one of our own. */
static int make_launches(const driver_record *driver, void *stream, PyObject *records, PyObject *given) {
  uint64_t addresses[MOST_ADDRESSES];
  Py_ssize_t num_addresses = PyTuple_GET_SIZE(given);
  if (num_addresses > MOST_ADDRESSES)
    return TOO_MANY;
  for (Py_ssize_t i = 0; i < num_addresses; ++i)
    addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, i));
  if (PyErr_Occurred())
    return RAISED;
  const char *at = PyBytes_AS_STRING(records), *end = at + PyBytes_GET_SIZE(records);
  void *parameters[MOST_PARAMETERS];
  int error;
  Py_BEGIN_ALLOW_THREADS;
  error = enter_context(driver);
  while (!error && at < end) {
    const launch_record *record = (const launch_record *)at;
    if ((size_t)(end - at) < sizeof *record || record->num_parameters > MOST_PARAMETERS ||
        (size_t)(end - at) < sizeof *record + record->num_parameters * sizeof(parameter_record)) {
      error = NOT_RECORDS;
      break;
    }
    parameter_record *parameter = (parameter_record *)(at + sizeof *record);
    for (uint32_t i = 0; i < record->num_parameters && !error; ++i, ++parameter) {
      if (parameter->place >= num_addresses)
        error = NOT_RECORDS;
      else
        parameters[i] = parameter->place < 0 ? &parameter->value : &addresses[parameter->place];
    }
    if (!error)
      error = driver->launch((void *)record->function, record->grid[0], record->grid[1], record->grid[2],
                             record->threads, 1, 1, record->shared, stream, parameters, NULL);
    at = (const char *)parameter;
  }
  Py_END_ALLOW_THREADS;
  return error;
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  int is_right = num_args >= 4 && num_args % 2 == 0;
  for (Py_ssize_t i = 2; is_right && i < num_args; i += 2)
    is_right = PyBytes_Check(args[i]) && PyTuple_Check(args[i + 1]);
  if (!is_right) {
    PyErr_SetString(PyExc_TypeError, "launch takes a driver, a stream, and records as bytes with tuples of addresses");
    return NULL;
  }
  const driver_record *driver = driver_in(args[0]);
  if (!driver)
    return NULL;
  uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred())
    return NULL;
  for (Py_ssize_t i = 2; i < num_args; i += 2) {
    int error = make_launches(driver, (void *)stream, args[i], args[i + 1]);
    if (error == RAISED)
      return NULL;
    if (error == TOO_MANY || error == NOT_RECORDS) {
      PyErr_SetString(PyExc_ValueError, error == TOO_MANY ? "too many addresses"
                                            : "records end within a launch, or name an address that was not given");
      return NULL;
    }
    if (error)
      return refused(driver, error);
  }
  Py_RETURN_NONE;
}

/* The driver and the handle of an event, which every call of one begins with. */
static const driver_record *event_in(PyObject *const *args, Py_ssize_t num_args, Py_ssize_t wanted, void **event) {
  const driver_record *driver = num_args == wanted ? driver_in(args[0]) : NULL;
  if (num_args != wanted)
    PyErr_SetString(PyExc_TypeError, "an event's call takes a driver and an event, and record takes a stream too");
  if (!driver)
    return NULL;
  *event = (void *)PyLong_AsUnsignedLongLong(args[1]);
  return PyErr_Occurred() ? NULL : driver;
}

static PyObject *record(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  void *event;
  const driver_record *driver = event_in(args, num_args, 3, &event);
  if (!driver)
    return NULL;
  uint64_t stream = PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred())
    return NULL;
  int error;
  Py_BEGIN_ALLOW_THREADS;
  error = enter_context(driver);
  if (!error)
    error = driver->record(event, (void *)stream);
  Py_END_ALLOW_THREADS;
  if (error)
    return refused(driver, error);
  Py_RETURN_NONE;
}

static PyObject *reached(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  void *event;
  const driver_record *driver = event_in(args, num_args, 2, &event);
  if (!driver)
    return NULL;
  int error = enter_context(driver);
  if (!error)
    error = driver->query(event);
  if (error && error != NOT_READY)
    return refused(driver, error);
  return PyBool_FromLong(!error);
}

static PyObject *wait_for(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  void *event;
  const driver_record *driver = event_in(args, num_args, 2, &event);
  if (!driver)
    return NULL;
  int error = enter_context(driver);
  if (!error)
    error = driver->query(event);
  if (error == NOT_READY) {
    Py_BEGIN_ALLOW_THREADS;
    error = driver->synchronize(event);
    Py_END_ALLOW_THREADS;
  }
  if (error)
    return refused(driver, error);
  Py_RETURN_NONE;
}

#define CALL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    CALL(launch), CALL(record), CALL(reached), CALL(wait_for), {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "driver_calls", NULL, -1, methods};

PyMODINIT_FUNC PyInit_driver_calls(void) { return PyModule_Create(&module); }
"""


@functools.cache
def driver_calls() -> DriverCalls | None:
    """The functions of C; None where they cannot be built, which is said once."""
    from triton.runtime.build import compile_module_from_src

    try:
        built: DriverCalls = compile_module_from_src(_SOURCE, "driver_calls")
        return built
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        logging.getLogger(__name__).warning("each step takes the host longer, as no compiler of C serves: %s", error)
        return None


def driver_of(backend: str, device: int) -> bytes | None:
    """What the functions of C know a device's driver by. None where its library was not loaded, or lacks a function."""
    found = _drivers.get((backend, device))
    if found is None and backend in _DRIVERS:
        found = _driver_of(device, *_DRIVERS[backend])
        if found is not None:  # a library that was not loaded may be so later
            _drivers[backend, device] = found
    return found


def _driver_of(device: int, library: str, names: Sequence[str], of_contexts: Sequence[str]) -> bytes | None:
    path = _loaded(library)
    if not path:
        return None
    try:
        # What is loaded already, and nothing else: a second copy would know nothing of kernels and streams.
        functions = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        named = [ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0 for name in (*names, *of_contexts)]
    except (OSError, AttributeError):
        return None
    return DRIVER.pack(*named, *[0] * (_NUM_FUNCTIONS - len(named)), device)


def _loaded(library: str) -> str:
    """The path of a library that this process has loaded; empty where it has not."""
    maps = Path("/proc/self/maps")
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()} if maps.exists() else set()
    return next((path for path in sorted(paths) if Path(path).name.startswith(library)), "")
