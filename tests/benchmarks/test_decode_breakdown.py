"""What each kernel of a step adds to it."""

from benchmarks.decode_breakdown import stages


def test_a_kernel_costs_what_it_ends_later():
    step = [(0, 1, "embed"), (2, 6, "qkv"), (3, 8, "rows"), (7, 12, "qkv"), (9, 10, "rows"), (10, 20, "rows"),
            (11, 21, "advance")]  # fmt: skip
    later = [(start + 100, end + 100, name) for start, end, name in step]
    assert stages(step + later, 2) == {
        "embed": 1.0,
        "qkv": (5 + 4) / 2,
        "rows": (2 - 2) / 2,  # the second of them ends before the kernel in front of it
        "lm_head": 8.0,
        "advance": 1.0,
    }
