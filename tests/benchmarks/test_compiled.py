"""What compiled.py reads from disassembled loops."""

from benchmarks.compiled import loops, on_their_way

LOOP = [
    ("LDG.E.EF.128", " R4, desc[UR4][R2.64]"),  # read by the next but one: one instruction between
    ("FADD", " R4, R1, R1"),  # a destination is no reader
    ("LOP3.LUT", " R9, R5, R6, R7, 0xea"),
    ("LDG.E.EF.64", " R10, desc[UR4][R2.64]"),  # read in the next round, by the store
    ("LDG.E.64", " R20, desc[UR4][R2.64]"),  # not streamed
    ("STG.E", " desc[UR4][R12.64], R11"),
]


def test_loads_on_their_way():
    mean, least, loads = on_their_way(LOOP)
    assert loads == 2
    assert least == 0
    assert mean == (1 + 1) / len(LOOP)


def test_an_innermost_loop_is_what_a_backward_branch_encloses():
    code = [(16 * k, name, rest) for k, (name, rest) in enumerate(LOOP)]
    code += [(96, "BRA", " 0x10"), (112, "BRA", " 0x0"), (128, "EXIT", "")]
    (inner,) = loops(code)
    assert [name for name, _ in inner] == [name for name, _ in LOOP[1:]] + ["BRA"]
