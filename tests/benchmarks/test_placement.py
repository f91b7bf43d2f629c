"""What `placement` makes of a step's notes, and that every kernel's source takes them."""

import sys
import textwrap

import torch
import triton

from benchmarks.placement import NUMBERS, Launch, described, launches, middle_layer, noting

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
            _waited = _began
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
    for name, kernel in sources.items():
        source = triton.JITFunction(kernel.fn).src
        assert noting(source, 0).startswith(f"def {name}("), name
        compile(noting(source, 0), name, "exec")


def test_launches_in_the_order_of_their_ends_and_a_layer_of_them():
    entries = torch.zeros(2, 3, 4, NUMBERS, dtype=torch.int64)
    counts = torch.tensor([[2, 2, 0], [2, 1, 1]], dtype=torch.int32)
    for launch in range(2):
        for program in range(2):
            entries[0, program, launch] = torch.tensor([100 * launch, 5, 100 * launch + 20 + program, 7])
    entries[1, 0] = torch.tensor([[1, 2, 40, 0], [1, 2, 150, 0], [0] * 4, [0] * 4])
    entries[1, 1, 0], entries[1, 2, 0] = torch.tensor([1, 2, 41, 1]), torch.tensor([1, 2, 42, 1])
    found = launches(entries, counts, ["rows", "add"])
    assert [(each.kernel, each.end, len(each.programs)) for each in found] == [
        ("rows", 21, 2), ("add", 42, 3), ("rows", 121, 2), ("add", 150, 1),
    ]  # fmt: skip
    assert [each.kernel for each in middle_layer(found, 2)] == ["add", "rows", "add"]


def test_a_line_says_where_programs_ran_and_when_they_ended():
    first = Launch("add", [(0, 0, 1000, 0)])
    rows = Launch("rows", [(900, 1500, 3000 + 1000 * k, k % 3) for k in range(4)])
    (line,) = described([first, rows], 4)
    assert line.split() == "rows 4 0.5 3.0 4.0 4.0 5.0 1 of 0, 2 of 1, 1 of 2".split()
