"""One cycle of lossless decoding in compiled code: a draft of some tokens, and the dense model's verdict on them.

    position p:    the last token that the dense model has chosen. Its K and V do not exist yet
    draft:         tokens d1 .. dg at p + 1 .. p + g, by steps from p on
    verification:  eight rows, *slots*. Slot s runs the token at p + s densely, s = 0 .. g, the others are done
    kept:          the dense model's choices t1 .. t(n + 1), where t1 .. tn are d1 .. dn, and t(n + 1) is not, or n = g

A slot is a row of the decoding step, with the same sums in the same order. So it chooses what a dense step of one row
chooses. Afterwards K and V of all heads are the dense model's up to p + n. Every watermark stands at p + n + 1, the new
position. What the draft left behind it is never read.
"""

from dejavu_train.engine.cpu.arrays import DENSE, DONE, SPARSE
from dejavu_train.engine.cpu.sampling import choose, is_stop, look_for_faults
from dejavu_train.engine.cpu.step import MODE, N_STEPS, TAIL_ONLY, head, residual_stream, step
from dejavu_train.engine.cpu.threads import barrier, compiled

FIRST, DRAFTED, ACCEPTED = 4, 5, 6  # words of a command beside those of a step. N_STEPS: tokens to draft


@compiled()
def open_slots(state, slots, first):
    """Slots of the positions from ``first`` to where the draft ends."""
    for s in range(slots.row_state.shape[0]):
        slots.position[s] = first + s
        slots.row_state[s] = DENSE if first + s <= state.position[0] else DONE
        slots.fault[s], slots.fault_site[s] = 0, 0


@compiled()
def keep_verified(state, slots, choices, command):
    """Write the dense model's choices up to the first that is not what was drafted, or that ends the sequence."""
    first, drafted = slots.position[0], state.position[0] - slots.position[0]
    accepted, over, at = 0, False, first
    state.fault[0] = 0  # what a draft computed is no part of the text
    for s in range(drafted + 1):
        at, token = first + s + 1, choices[s]
        same = s < drafted and state.tokens[0, at] == token
        accepted += same
        state.tokens[0, at] = token
        state.fault[0], state.fault_site[0] = slots.fault[s], slots.fault_site[s]
        over = is_stop(state, token) or slots.fault[s] != 0 or at + 1 >= state.limit[0]
        if over or not same:
            break
    state.position[0] = at
    state.row_state[0] = DONE if over else SPARSE
    state.watermark[:] = at
    command[DRAFTED], command[ACCEPTED] = drafted, accepted


@compiled()
def verify(dense, rules, state, slots, work, choices, control, command, thread, n_threads):
    """The dense model's choice behind every drafted token, and what follows from it. Slots were opened."""
    mode = command[MODE]
    residual_stream(dense, rules, slots, work, control, command[TAIL_ONLY], thread, n_threads)
    head(dense, slots, work, control, mode, 0, thread, n_threads)
    for s in range(thread, slots.row_state.shape[0], n_threads):
        if slots.row_state[s] != DONE:
            look_for_faults(slots, work, s, n_threads)
            choices[s] = choose(slots, work, s, mode, n_threads)
    barrier(control, n_threads)
    if thread == 0:
        keep_verified(state, slots, choices, command)
    barrier(control, n_threads)


@compiled()
def cycle(draft, selectors, state, draft_work, dense, rules, slots, work, choices, control, command, thread, n_threads):
    """A draft of command[N_STEPS] tokens and its verification. Of command[TAIL_ONLY] the token behind a prompt.

    Tokens between the position command[FIRST] and the state's were drafted elsewhere.
    """
    for _ in range(command[N_STEPS]):
        if state.row_state[0] == DONE:
            break
        step(draft, selectors, state, draft_work, control, command[MODE], 0, 0, thread, n_threads)
    if thread == 0:
        open_slots(state, slots, command[FIRST])
    barrier(control, n_threads)
    verify(dense, rules, state, slots, work, choices, control, command, thread, n_threads)
