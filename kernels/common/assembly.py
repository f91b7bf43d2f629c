"""Assembly in kernels: PTX that every thread carries out on its own elements of tiles, one element each.

Functions that have some take ASM. Without it, as in the interpreter, they have a twin in plain arithmetic.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import INTERPRET

ASSEMBLY = tl.constexpr(not INTERPRET)


@triton.constexpr_function
def _dtypes(operands):
    """Of the results."""
    letters = {"r": tl.int32, "f": tl.float32, "l": tl.int64}
    return tuple(letters[each[-1]] for each in operands.split(",") if each.startswith("="))


@triton.jit
def assembly(text: tl.constexpr, operands: tl.constexpr, given, PURE: tl.constexpr = False):
    """The tile, or the tuple of several, that `text` makes of the tuple `given`.

    operands: results, then inputs, in LLVM's letters: r is int32, f fp32, l int64 or a pointer. PURE: it does nothing
    else and depends on nothing else. The compiler may then move it, or leave it out.
    """
    found = tl.inline_asm_elementwise(text, operands, given, dtype=_dtypes(operands), is_pure=PURE, pack=1)
    if len(found) == 1:
        found = found[0]
    return found
