"""Assembly in kernels: PTX that every thread carries out on its own elements of tiles, one element each.

Functions that have some take ASM. Without it, as in the interpreter, they have a twin in plain arithmetic.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import INTERPRET

ASSEMBLY = tl.constexpr(not INTERPRET)


@triton.constexpr_function
def _dtypes(letters):
    """Dtypes of the results."""
    kinds = {"r": tl.int32, "f": tl.float32, "l": tl.int64}
    return tuple(kinds[each[-1]] for each in letters.split(",") if each.startswith("="))


@triton.constexpr_function
def operands(result, results, given, inputs, others="f", more=0):
    """So many results, inputs, and inputs of another kind. "=&": written before the last input is read."""
    return ",".join([result] * results + [given] * inputs + [others] * more)


@triton.jit
def assembly(text: tl.constexpr, letters: tl.constexpr, given, PURE: tl.constexpr = False):
    """The tile, or the tuple of several, that `text` makes of the tuple `given`.

    letters: results, then inputs, in LLVM's letters: r is int32, f fp32, l int64 or a pointer. PURE: it does nothing
    else and depends on nothing else. The compiler may then move it, or leave it out.
    """
    found = tl.inline_asm_elementwise(text, letters, given, dtype=_dtypes(letters), is_pure=PURE, pack=1)
    if len(found) == 1:
        found = found[0]
    return found
