"""How kernels are compiled: numba's JIT with an on-disk cache, ``memcpy`` and an unaligned load as intrinsics.

A compiled function is a plain typed Python function with a decorator. Machine code is cached under ``NUMBA_CACHE_DIR``, else
beside the source, else in the user's cache directory. If none of these is writable, each process compiles for itself, which
takes two to three seconds. The cache belongs to the source file of a kernel: after a change of an inlined function in another
file, remove ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Bools: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints32: TypeAlias = npt.NDArray[np.int32]
Ints64: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Int: TypeAlias = int | np.int64
"""In compiled code both are the same 64 bits; Python's type checker distinguishes them."""


def compiled(function: Function) -> Function:
    """Compile on the first call. The GIL is released while the function runs."""
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        # numba raises this if it finds no writable place for its cache (a read-only installation without a home directory).
        return cast(Function, numba.njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """Inline a function into its compiled callers: a real call that passes arrays counts references."""
    return cast(Function, numba.njit(forceinline=True, nogil=True)(function))


_emit_memcpy: Callable[..., None] = cgutils.raw_memcpy


def _copy_bytes(context: Any, target: Any, target_at: Any, source: Any, source_at: Any, length: Any) -> Any:
    def generate(generator: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target_array = generator.make_array(signature.args[0])(generator, builder, arguments[0])
        source_array = generator.make_array(signature.args[2])(generator, builder, arguments[2])
        to = builder.gep(target_array.data, [arguments[1]])
        come_from = builder.gep(source_array.data, [arguments[3]])
        _emit_memcpy(builder, to, come_from, arguments[4], ir.Constant(arguments[4].type, 1))
        return generator.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


copy_bytes = cast("Callable[[Any, Any, Any, Any, Any], None]", intrinsic(_copy_bytes))
"""``copy_bytes(target, target_at, source, source_at, length)`` between uint8 arrays, only in compiled code.

Seven to ten times as fast as a byte loop. It checks nothing: the caller must have checked the bounds of both ranges.
"""


def _load_word(context: Any, source: Any, at: Any) -> Any:
    def generate(generator: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = generator.make_array(signature.args[0])(generator, builder, arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        word = builder.load(place)
        word.align = 1
        return word

    return types.uint64(source, types.int64), generate


load_word = cast("Callable[[Any, Any], np.uint64]", intrinsic(_load_word))
"""``load_word(source, at)``: eight bytes of a uint8 array, in the machine's order, only in compiled code.

It checks nothing, as ``copy_bytes``.
"""
