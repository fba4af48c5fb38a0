"""Several launches of compiled kernels as one call: what the driver is given is written down once, as bytes.

Triton's launcher takes its arguments apart in each launch, one Python object after the other, and a layer of a step
makes several launches. Here a function of C hands them to the driver one after the other, from bytes that were put
together before, with places for the addresses that differ from call to call. Triton builds it as it builds its own
launchers, with the compiler that it needs for these; where that fails, launches are made one by one, as Triton does.

Written down are launches that hand over pointers and numbers, without clusters, cooperation, early starts or scratch
memory; see packed(). A kernel's parameters, which Triton knows as its signature, say what each argument is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rocm_attn.kernels.driver_call import Arguments, Place, Run, arguments_of, driver_call

# A record of a launch: function, grid, threads, bytes of shared memory, number of parameters. Then its parameters.
_LAUNCH = struct.Struct("=Q6I")
# A parameter: its value, or the number of the address that takes its place; -1: its value.
_PARAMETER = struct.Struct("=8sq")
# Triton's kernels take two addresses of scratch memory after their own parameters. The driver reads none too many.
_SCRATCH = 2 * _PARAMETER.pack(bytes(8), -1)
# Above this, CUDA wants an attribute with the launch.
_MOST_SHARED_BYTES = 228 * 1024

# What a launcher does beside handing its arguments over, where one of these is not 0.
_ASKS = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "gsan_enabled"
# As in the source below.
_MOST_ADDRESSES, _MOST_PARAMETERS = 64, 256

_PACKED_AS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "f32": "f", "fp64": "d"}
_PACKED_AS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}

# driver, stream, records, addresses -> nothing. Raises RuntimeError where the driver refuses a launch.
LaunchPacked = Callable[[bytes, int, bytes, tuple[int, ...]], None]

# The addresses of its functions, and the device.
_DRIVER = struct.Struct("=5Qq")
# A backend of Triton -> the driver's library, and its functions in the order of _DRIVER; "": there is none.
_DRIVERS = {
    "cuda": (
        "libcuda.so",
        ("cuLaunchKernel", "cuGetErrorString", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
    ),
    "hip": ("libamdhip64.so", ("hipModuleLaunchKernel", "hipDrvGetErrorString", "", "", "")),
}

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST_ADDRESSES 64
#define MOST_PARAMETERS 256

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
typedef int (*describe_t)(int, const char **);
typedef int (*current_t)(void **);
typedef int (*retain_t)(void **, int);
typedef int (*set_t)(void *);

/* What a device's driver is asked by. Those of contexts are CUDA's alone, whose threads may have none yet. */
typedef struct {
  launch_t launch;
  describe_t describe;
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

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  if (num_args != 4 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != sizeof(driver_record) ||
      !PyBytes_Check(args[2]) || !PyTuple_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "launch takes a driver, a stream, records as bytes and a tuple of addresses");
    return NULL;
  }
  const driver_record *driver = (const driver_record *)PyBytes_AS_STRING(args[0]);
  uint64_t stream = PyLong_AsUnsignedLongLong(args[1]), addresses[MOST_ADDRESSES];
  Py_ssize_t num_addresses = PyTuple_GET_SIZE(args[3]);
  if (PyErr_Occurred())
    return NULL;
  if (num_addresses > MOST_ADDRESSES) {
    PyErr_SetString(PyExc_ValueError, "too many addresses");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < num_addresses; ++i)
    addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args[3], i));
  if (PyErr_Occurred())
    return NULL;
  const char *at = PyBytes_AS_STRING(args[2]), *end = at + PyBytes_GET_SIZE(args[2]);
  void *parameters[MOST_PARAMETERS];
  int error = 0, is_whole = 1;
  Py_BEGIN_ALLOW_THREADS;
  error = enter_context(driver);
  while (!error && at < end) {
    const launch_record *record = (const launch_record *)at;
    if (at + sizeof *record > end || record->num_parameters > MOST_PARAMETERS ||
        at + sizeof *record + record->num_parameters * sizeof(parameter_record) > end) {
      is_whole = 0;
      break;
    }
    parameter_record *parameter = (parameter_record *)(at + sizeof *record);
    for (uint32_t i = 0; i < record->num_parameters; ++i, ++parameter) {
      if (parameter->place >= num_addresses) {
        is_whole = 0;
        break;
      }
      parameters[i] = parameter->place < 0 ? &parameter->value : &addresses[parameter->place];
    }
    if (!is_whole)
      break;
    error = driver->launch((void *)record->function, record->grid[0], record->grid[1], record->grid[2],
                          record->threads, 1, 1, record->shared, (void *)stream, parameters, NULL);
    at = (const char *)parameter;
  }
  Py_END_ALLOW_THREADS;
  if (!is_whole) {
    PyErr_SetString(PyExc_ValueError, "records end within a launch, or name an address that was not given");
    return NULL;
  }
  if (error) {
    const char *what = NULL;
    if (!driver->describe || driver->describe(error, &what) || !what)
      what = "of which the driver says no more";
    return PyErr_Format(PyExc_RuntimeError, "a kernel could not be launched: error %d, %s", error, what);
  }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(driver, stream, records, addresses)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "packed_launches", NULL, -1, methods};

PyMODINIT_FUNC PyInit_packed_launches(void) { return PyModule_Create(&module); }
"""


@functools.cache
def launcher() -> LaunchPacked | None:
    """The function of C; None where it cannot be built, which is said once."""
    from triton.runtime.build import compile_module_from_src

    try:
        built: LaunchPacked = compile_module_from_src(_SOURCE, "packed_launches").launch
        return built
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        logging.getLogger(__name__).warning("launches are made one by one, as no compiler of C serves: %s", error)
        return None


@functools.cache
def driver_of(backend: str, device: int) -> bytes | None:
    """What launcher() asks a device's driver by. None where its library was not loaded, or lacks a function."""
    library, names = _DRIVERS.get(backend, ("", ()))
    path = _loaded(library)
    if not path:
        return None
    try:
        # What is loaded already, and nothing else: a second copy would know nothing of kernels and streams.
        functions = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        addresses = [ctypes.cast(getattr(functions, name), ctypes.c_void_p).value if name else 0 for name in names]
    except (OSError, AttributeError):
        return None
    return _DRIVER.pack(*addresses, device)


def _loaded(library: str) -> str:
    """The path of a library that this process has loaded; empty where it has not."""
    if not library:
        return ""
    maps = Path("/proc/self/maps")
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()} if maps.exists() else set()
    return next((path for path in sorted(paths) if Path(path).name.startswith(library)), "")


def packed(compiled: Any, grid: tuple[int, ...], arguments: Sequence[object]) -> bytes | None:
    """The record of a launch; None where it is none of those that are written down.

    arguments: all of the kernel's in order, constexpr ones included: addresses, numbers, and Places of addresses, whose
               numbers count from 1
    """
    if not all(hasattr(compiled, name) for name in ("run", "metadata", "packed_metadata", "src")):
        return None
    num_warps, num_blocks, shared_bytes = compiled.packed_metadata
    kinds = tuple(compiled.src.signature.values())
    if num_blocks != 1 or shared_bytes > _MOST_SHARED_BYTES or not _is_plain(compiled) or len(kinds) != len(arguments):
        return None
    parameters = []
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind != "constexpr":
            parameter = _parameter(kind, argument)
            if parameter is None:
                return None
            parameters.append(parameter)
    if len(parameters) + 2 > _MOST_PARAMETERS:
        return None
    threads = num_warps * compiled.metadata.target.warp_size
    head = _LAUNCH.pack(compiled.function, *(*grid, 1, 1)[:3], threads, shared_bytes, len(parameters) + 2)
    return b"".join((head, *parameters, _SCRATCH))


def _is_plain(compiled: Any) -> bool:
    """Whether nothing but a grid, threads and shared memory goes with a launch."""
    of_both = compiled.run, compiled.metadata
    return hasattr(compiled.run, "launch") and not any(getattr(each, name, 0) for each in of_both for name in _ASKS)


def _parameter(kind: object, argument: object) -> bytes | None:
    """A parameter of a kind of Triton's signatures; None for a kind that is not known, or what is none of it."""
    if not isinstance(kind, str):
        return None
    if kind.startswith("*"):
        if isinstance(argument, Place):
            return _PARAMETER.pack(bytes(8), argument.number - 1)
        kind, argument = "u64", 0 if argument is None else argument
    if kind not in _PACKED_AS or not isinstance(argument, (bool, int, float)):
        return None
    try:
        return _PARAMETER.pack(struct.pack("=" + _PACKED_AS[kind], argument).ljust(8, b"\0"), -1)
    except (struct.error, OverflowError):
        return None


# A variant of a kernel, its grid, and all arguments of the kernel: see packed().
Prepared = tuple[Any, tuple[int, ...], Sequence[object]]


def put_together(launches: Sequence[Prepared], num_addresses: int) -> tuple[list[tuple[Run, Arguments]], list[object]]:
    """What makes these launches on the current device, and what puts its arguments together.

    Of (stream, *addresses, *constants), where the addresses take the Places 1, 2, ..., and the constants come second.
    """
    together = _together(launches, num_addresses)
    # The variants are held, though they are no arguments: Triton unloads what is held no longer.
    variants: list[object] = [compiled for compiled, _, _ in launches]
    if together is not None:
        return [together], variants
    constants: list[object] = []
    made = []
    for compiled, grid, arguments in launches:
        run, template = driver_call(compiled, grid, Place(0), arguments)
        made.append((run, arguments_of(template, 1 + num_addresses, constants)))
    return made, [*constants, *variants]


def _together(launches: Sequence[Prepared], num_addresses: int) -> tuple[Run, Arguments] | None:
    """All launches as one call; None where one of them cannot be written down."""
    records = [packed(*each) for each in launches]
    if None in records or num_addresses > _MOST_ADDRESSES:
        return None
    backends = {compiled.metadata.target.backend for compiled, _, _ in launches}
    driver = driver_of(backends.pop(), torch.cuda.current_device()) if len(backends) == 1 else None
    launch = launcher() if driver is not None else None
    if launch is None:
        return None
    all_records, end = b"".join(record for record in records if record is not None), 1 + num_addresses
    return functools.partial(launch, driver), lambda values: (values[0], all_records, values[1:end])
