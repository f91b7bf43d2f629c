"""What `phases` makes of the kernels' sources, and of the times that their programs note."""

import importlib

import pytest
import torch
import triton

from benchmarks.phases import PLACES, Place, described, noting

SOURCE = """\
def _kernel(x, PDL):
    y = load(x)
    if PDL:
        wait(PDL)
    store(x, y)
"""


def test_a_place_is_noted_before_or_after_its_line_or_at_the_end():
    places = {
        4: Place("k", "has y", "_kernel", "wait(", "y"),
        5: Place("k", "waited", "_kernel", "wait(", "x", True),
        6: Place("k", "ends", "_kernel", "", "x"),
    }
    assert noting(SOURCE, places) == SOURCE.replace(
        "        wait(PDL)\n", "        note_place(4, y)\n        wait(PDL)\n        note_place(5, x)\n"
    ) + "    note_place(6, x)\n"  # fmt: skip
    with pytest.raises(AssertionError, match="no such line"):
        noting(SOURCE, {0: Place("k", "lost", "_kernel", "sum(", "y")})


@pytest.mark.parametrize("name", sorted({place.function for place in PLACES}))
def test_every_place_is_in_its_function(name):
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(f"kernels.{module}"), function)
    own = {number: place for number, place in enumerate(PLACES) if place.function == name}
    source = noting(triton.JITFunction(kernel.fn).src, own)
    compile(source, name, "exec")
    assert source.count("note_place(") >= len(own)


def test_times_are_told_from_the_first_program_of_a_kernel():
    times = torch.zeros(len(PLACES), 4, dtype=torch.int64)
    times[0, :3] = torch.tensor([7000, 5000, 6000])
    times[1, :3] = torch.tensor([9000, 8000, 9500])
    assert described(times) == [
        "int4_mlp        begins                3    0.0    0.0    1.0    1.0    2.0",
        "int4_mlp        has asked             3    3.0    3.0    4.0    4.0    4.5",
    ]
