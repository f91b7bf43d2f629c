"""What `placement` makes of a step's notes, and that every kernel's source takes them."""

import sys
import textwrap

import torch
import triton

from benchmarks.placement import GRID, NUMBERS, Launch, described, launches, middle_layer, noting

KERNEL = '''\
def _rows_kernel(
    x, n: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A docstring."""
    if n > 0:
        wait_for_predecessor(PDL)
        tl.store(x, n)
'''


def test_a_kernel_notes_its_start_wait_and_end():
    assert noting(KERNEL, 3) == textwrap.dedent('''\
        def _rows_kernel(
            x, n: tl.constexpr,
            PDL: tl.constexpr,
        ):  # fmt: skip
            """A docstring."""
            _number = launch_number(3)
            _began = time_now()
            _waited = _began * 0
            if n > 0:
                wait_for_predecessor(PDL)
                _waited = time_now()
                tl.store(x, n)
            note_end(_number, _began, _waited, 3)
        ''')


def test_every_kernel_can_be_noted():
    import dejavu_train.engine.ops  # noqa: F401

    kernels = [
        each
        for name, module in list(sys.modules.items())
        if name.startswith("kernels.")
        for each in vars(module).values()
        if hasattr(each, "src") or hasattr(each, "fn")
    ]
    sources = {k.fn.__name__: k for k in kernels if hasattr(k, "fn") and k.fn.__name__.endswith("_kernel")}
    assert {"_dense_rows_kernel", "_sparse_mlp_kernel", "_qkv_select_kernel"} <= set(sources)
    waits = set()
    for name, kernel in sources.items():
        source = noting(triton.JITFunction(kernel.fn).src, 0)
        assert source.startswith(f"def {name}("), name
        compile(source, name, "exec")
        waits |= {name} if "_waited = time_now()" in source else set()
    assert {"_dense_rows_kernel", "_sparse_mlp_kernel", "_int4_fc2_kernel", "_project_head_rows_kernel"} <= waits


def test_launches_in_the_order_of_their_ends_and_a_layer_of_them():
    entries = torch.zeros(2, 3, 4, NUMBERS, dtype=torch.int64)
    counts = torch.zeros(2, 3, dtype=torch.int32)

    def note(kernel, programs, end):
        for program in range(programs):
            number = int(counts[kernel, program])
            entries[kernel, program, number] = torch.tensor([1, 2, end + program, programs * GRID + 7])
            counts[kernel, program] += 1

    for layer in range(2):
        note(0, 2, 100 * layer + 20)
        note(1, 1, 100 * layer + 50)
    note(0, 3, 300)  # the LM head: the layers' kernel in a larger grid
    found = launches(entries, counts, ["rows", "add"])
    assert [(each.kernel, each.end, len(each.programs)) for each in found] == [
        ("rows", 21, 2), ("add", 50, 1), ("rows", 121, 2), ("add", 150, 1), ("rows", 302, 3),
    ]  # fmt: skip
    assert [each.kernel for each in middle_layer(found, 2)] == ["add", "rows", "add"]
    assert found[0].programs == [(1, 2, 20, 7), (1, 2, 21, 7)]


def test_a_line_says_where_programs_ran_and_when_they_ended():
    first = Launch("add", [(0, 0, 1000, 0)])
    for wait, said in ((1500, "0.5"), (0, "-")):
        rows = Launch("rows", [(900, wait, 3000 + 1000 * k, k % 3) for k in range(4)])
        (line,) = described([first, rows], 4)
        assert line.split() == f"rows 4 {said} 3.0 4.0 4.0 5.0 1 of 0, 2 of 1, 1 of 2".split()
