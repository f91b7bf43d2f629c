"""Which refusals a random program may meet: the call, a pattern of the one line, and why it is right."""

import re

COMPUTES = "forward|generate|score|thread|adapt|poison|twin|train"  # the calls that compute, or hold one that does

ROWS: tuple[tuple[str, str, str], ...] = (
    ("train", r"gives no gradients", "rows that are read alone have no backward pass"),
    (COMPUTES, r"is not for the (decode|CPU) engine", "an engine that is asked for by name does plain decoding"),
    ("adapt", r"^peft: Target module GroupedProjection", "an engine of a GPU holds q, k and v; adapters go in before"),
    ("adapt", r"backend='gather'|backend='mask'", "what a module does beside its weight may be refused by name"),
)


def allowed(call: str, message: str) -> bool:
    """Whether a row allows this refusal of this call."""
    return any(re.fullmatch(names, call) and re.search(pattern, message) for names, pattern, _ in ROWS)
