"""A team of threads inside compiled code: atomic counters, and a barrier that spins briefly and then sleeps.

A decoding step is a chain of short parallel phases, some seven a layer, so that a barrier must cost less than a
microsecond. Numba's own parallel loops take many times that to start. A thread that waits spins a few times as long as
sleeping and waking take. Meanwhile it offers its core to other processes every few microseconds. Then it sleeps on a
condition variable. Other processes get their share of the cores, and an idle team uses none. On a virtual machine a
sleep of any length costs some 50 microseconds: with spins of 5 microseconds, barriers were half of a step.

``control`` is an int64 array of CONTROL_WORDS words. Words that different threads write lie on different cache lines.
"""

import ctypes
import functools
import os
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dejavu_train.engine.cpu.pipeline import Part

CONTROL_WORDS = 64
ARRIVED, GENERATION, SLEEPERS = 0, 8, 16  # word numbers
MUTEX, CONDITION = 24, 40  # 128 bytes each: larger than any pthread_mutex_t and pthread_cond_t
SPINS, PAUSES = 50, 100  # rounds of pauses, 3 to 5 microseconds each, with an offer of the core after each

SUPPORTED = os.name == "posix"
_POINTER = types.intp
_mutex_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(_POINTER))
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(_POINTER))
_condition_wait = types.ExternalFunction("pthread_cond_wait", types.int32(_POINTER, _POINTER))
_offer_core = types.ExternalFunction("sched_yield", types.int32())
_condition_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(_POINTER))
_X86 = platform.machine() in ("x86_64", "AMD64")


without_counts = functools.partial(
    njit, nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True, no_rewrites=True
)
compiled = functools.partial(without_counts, no_cpython_wrapper=True, pipeline_class=Part)
"""Decorates what only compiled code calls. Without numba's reference counts, whose atomic increments in every
loop cost more than the loops: the caller of compiled code holds all arrays, and nothing is allocated."""


def _word(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add ``value`` to an int64 word, sequentially consistent. Returns what stood there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", word, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """An int64 word, sequentially consistent."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(word, "seq_cst", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def atomic_store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Set an int64 word, sequentially consistent."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], word, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def address(typingctx: Any, array: Any, index: Any) -> Any:
    """The address of an element, for calls of the C library."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature.args[0], args[0], args[1])
        return builder.ptrtoint(word, context.get_value_type(types.intp))

    return types.intp(array, types.int64), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell an x86 processor that this thread spins. Elsewhere nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The fp32 number with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_from_float(typingctx: Any, value: Any) -> Any:
    """The 32 bits of an fp32 number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


def new_control() -> np.ndarray:
    """The shared words of one team."""
    control = np.zeros(CONTROL_WORDS, dtype=np.int64)
    library = ctypes.CDLL(None)
    for initialise, word in ((library.pthread_mutex_init, MUTEX), (library.pthread_cond_init, CONDITION)):
        initialise(ctypes.c_void_p(control[word:].ctypes.data), None)
    return control


@compiled()
def barrier(control: np.ndarray, n_threads: int) -> None:
    """Return when all threads of the team have called. What they wrote before is then visible to all."""
    if n_threads == 1:
        return
    generation = atomic_load(control, GENERATION)
    if atomic_add(control, ARRIVED, 1) == n_threads - 1:
        atomic_store(control, ARRIVED, 0)
        atomic_store(control, GENERATION, generation + 1)
        # A sleeper counts itself before it looks at the generation, so one of the two sees the other.
        if atomic_load(control, SLEEPERS) > 0:
            _mutex_lock(address(control, MUTEX))
            _condition_broadcast(address(control, CONDITION))
            _mutex_unlock(address(control, MUTEX))
        return
    for _ in range(SPINS):
        for _ in range(PAUSES):
            if atomic_load(control, GENERATION) != generation:
                return
            pause()
        _offer_core()
    _mutex_lock(address(control, MUTEX))
    atomic_add(control, SLEEPERS, 1)
    while atomic_load(control, GENERATION) == generation:
        _condition_wait(address(control, CONDITION), address(control, MUTEX))
    atomic_add(control, SLEEPERS, -1)
    _mutex_unlock(address(control, MUTEX))
