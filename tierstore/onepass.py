"""The loops that numba compiles, on plain arrays; imported only by `compiled`, and only where numba is installed.

Multiplications and additions are fused where torch's kernel fuses them: in both moments, not in the parameter.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

BLOCK = 1024
HALF_WAY = -0x8000
I16, I32, F32 = np.int16, np.int32, np.float32


@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        real = ir.FloatType()
        kind = ir.FunctionType(real, [real, real, real])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _as_bits(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@numba.njit(inline="always")
def _rounded(bits):
    """The upper 16 bits of a float32, rounded to the nearest, ties to even."""
    return I32(I32(bits + I32(0x7FFF) + ((bits >> I32(16)) & I32(1))) >> I32(16))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def update_whole(p, g, m, v, w, start, stop, check, decay, w1, b2, one_b2, correction, eps, step_size):
    """Update elements from `start` to before `stop`; tell whether there is a NaN among them."""
    p, g, m, v, w = p[start:stop], g[start:stop], m[start:stop], v[start:stop], w[start:stop]
    has_nan = I32(0)
    for i in range(len(p)):  # from 0 on, else numba asks of each number whether it is negative
        x = w[i]
        low = I32(p[i])
        widened = _as_float(I32(low << I32(16)))
        is_other = ((_rounded(_as_bits(x)) ^ low) & I32(0xFFFF)) != 0
        is_adopted = check & is_other & ((x == x) | (widened == widened))
        x = widened if is_adopted else x
        gradient = _as_float(I32(I32(g[i]) << I32(16)))
        x = x * decay
        a = m[i]
        a = _fma(w1, gradient - a, a)
        b = _fma(one_b2 * gradient, gradient, v[i] * b2)
        x = x + step_size * a / (F32(math.sqrt(b)) / correction + eps)
        m[i] = a
        v[i] = b
        w[i] = x
        has_nan = I32(has_nan | I32(x != x))
        p[i] = I16(_rounded(_as_bits(x)))
    return has_nan != 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def update_split(p, g, m, v, low, tie, start, stop, check, decay, w1, b2, one_b2, correction, eps, step_size):
    """Update elements from `start` to before `stop`, whole blocks, with split masters."""
    bits = np.empty(BLOCK, I32)
    for first in range(start, stop, BLOCK):
        end = first + BLOCK
        _combine(p[first:end], low[first:end], tie[first // 8 : end // 8], bits)
        factors = decay, w1, b2, one_b2, correction, eps, step_size
        is_any = _update_block(p[first:end], g[first:end], m[first:end], v[first:end], low[first:end], bits, *factors)
        if is_any != 0:
            for k in range(BLOCK):
                if low[first + k] == HALF_WAY:
                    i, mask = (first + k) >> 3, 1 << (k & 7)
                    tie[i] = (tie[i] & (0xFF ^ mask)) | (0 if (bits[k] >> 16) & 1 else mask)
    return False


@numba.njit(nogil=True, error_model="numpy")
def _combine(p, low, tie, bits):
    """Make the bits of the masters of a block."""
    is_any = I32(0)
    for k in range(len(p)):
        remainder = I32(low[k])
        is_any = I32(is_any | I32(remainder == I32(HALF_WAY)))
        bits[k] = I32(I32(I32(p[k]) << I32(16)) + remainder)
    if is_any != 0:
        for k in range(len(p)):
            if low[k] == HALF_WAY and (tie[k >> 3] >> (k & 7)) & 1:
                bits[k] = I32(bits[k] + I32(0x10000))


@numba.njit(nogil=True, error_model="numpy")
def _update_block(p, g, m, v, low, bits, decay, w1, b2, one_b2, correction, eps, step_size):
    """Update a block of masters; tell whether any of them has become half way."""
    is_any = I32(0)
    for k in range(len(p)):
        x = _as_float(bits[k])
        widened = _as_float(I32(I32(p[k]) << I32(16)))
        x = widened if (x != x) & (widened == widened) else x
        gradient = _as_float(I32(I32(g[k]) << I32(16)))
        x = x * decay
        a = m[k]
        a = _fma(w1, gradient - a, a)
        b = _fma(one_b2 * gradient, gradient, v[k] * b2)
        x = x + step_size * a / (F32(math.sqrt(b)) / correction + eps)
        m[k] = a
        v[k] = b
        u = _as_bits(x)
        bits[k] = u
        low[k] = I16(u)
        is_any = I32(is_any | I32(I32(I16(u)) == I32(HALF_WAY)))
        p[k] = I16(_rounded(u) if x == x else I32(0x7FC0))
    return is_any
