"""Sizes for which the kernel of all layers is compiled, and which there are. Loads no torch."""

import math
from dataclasses import dataclass
from enum import IntEnum

PROGRAMS, THREADS = 128, 320
KV_HEADS = (8, 16, 32)  # of as many programs each
GROUP = 128  # columns of a scale
WIDTHS, HEAD_DIMS, RANKS = (2048, 4096), (64, 128), (128, 256)
NEURONS = 128  # of a program, at most
SMALL_BYTES, LAYER_BYTES, GATE_BYTES = 5376, 200, 24  # beside the pages: of a program, of a layer and of its gate
SHARED_BYTES = 232448  # of a multiprocessor that a program can have
MOST_PAGES, LEAST_PAGES = 12, 6
SYNC = 16 * 32  # words


class Neurons(IntEnum):
    """Mode: which rows of an MLP a step reads."""

    ALL = 0
    LIVE = 1
    SELECTED = 2

    @property
    def words(self) -> str:
        return ("all neurons", "up, and down of the neurons that are not zero", "the selected neurons")[self]


def _spread(words: int) -> int:
    """Words of an array and 32 more, with the gaps of `spread` in the source."""
    return (words + 32) * 9 // 8 + 4


@dataclass(frozen=True)
class StepSizes:
    """Sizes for which the kernel is compiled, and what its layers compute. Without more they are OPT's.

    rank: of the MLPs' predictors, 0 = none. relu: within these. partly: some layers have none.
    kv_heads: of K and V, 0 = heads. rms: norms are RMSNorm. rotary: q and k are turned.
    biases: linear maps have them. The first of an MLP always does.
    gated: act(gate) up instead of act(up). both: act(gate) act(up). act: a ReLU with this threshold, squared or not.
    """

    d: int
    heads: int
    head_dim: int
    d_ffn: int
    layers: int
    neurons: Neurons
    rank: int = 0
    relu: bool = False
    kv_heads: int = 0
    rms: bool = False
    rotary: bool = False
    biases: bool = True
    gated: bool = False
    squared: bool = False
    both: bool = False
    threshold: float = 0.0
    partly: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def share(self) -> int:
        """Heads that share K and V."""
        return self.heads // self.kv_heads

    @property
    def teams(self) -> int:
        """How many ways the programs of a head of K and V share its heads. Those of a team share the positions."""
        return math.gcd(self.share, PROGRAMS // self.kv_heads // 4)

    @property
    def team_words(self) -> int:
        """Words that a team's programs exchange: each a part of each head, its largest score and its sum."""
        return self.share * PROGRAMS // self.kv_heads // self.teams**2 * (self.head_dim + 2)

    @property
    def exchange(self) -> int:
        """Words of a head of K and V: q's, k and v, the teams' parts, hidden values of neurons. Whole lines of 16."""
        words = (self.share + 2) * self.head_dim + self.teams * self.team_words + self.d_ffn // self.kv_heads
        return -(-words // 16) * 16

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's row in the table of tensors."""
        return LAYER_BYTES + GATE_BYTES * self.gated

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: 16 KB of rows, or quarters of 32 neurons, with their scales, and room between them."""
        rows = 16384 // (self.d // 2)
        return max(16384 + rows * (16 + self.d // 64), 32 * (self.d // 8 + 16 + self.d // 256))

    @property
    def list_pages(self) -> int:
        """Pages of the ring of listed neurons."""
        return {Neurons.ALL: 4, Neurons.LIVE: 2, Neurons.SELECTED: 3}[self.neurons]  # of ALL it has most bytes

    @property
    def pages(self) -> int:
        """Pages of the other ring that fit beside these and the table of layers."""
        return min(MOST_PAGES, (SHARED_BYTES - self.small_bytes) // self.page_bytes - self.list_pages)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a program."""
        return self.page_bytes * (self.pages + self.list_pages) + self.small_bytes

    @property
    def small_bytes(self) -> int:
        """Bytes beside the pages: sums of columns, what programs tell each other, and the table of layers."""
        mixed, own = self.share // self.teams, self.d_ffn // PROGRAMS
        words = max(9 * 128, 8 * mixed * self.head_dim, self.d // 4) + 16 * mixed
        words += max(_spread((self.share + 2) * self.head_dim) + _spread(self.team_words), 2 * _spread(4 * own))
        return SMALL_BYTES + -(-4 * words // 128) * 128 + self.layer_bytes * self.layers

    @property
    def refusal(self) -> str:
        """Why the kernel does not take these sizes, or ""."""
        own = self.d_ffn // PROGRAMS
        for what, got, allowed in (
            ("a width", self.d, WIDTHS),
            ("K/V heads", self.kv_heads, KV_HEADS),
            ("a head dim", self.head_dim, HEAD_DIMS),
            *((("a predictor's rank", self.rank, RANKS),) if self.neurons is Neurons.SELECTED else ()),
        ):
            if got not in allowed:
                return f"it takes {what} of {' or '.join(map(str, allowed))}, not {got}"
        rows = self.head_dim * self.kv_heads // PROGRAMS  # of a program, of each of q, k and v
        columns = self.d * self.kv_heads * self.teams // PROGRAMS
        if self.heads % self.kv_heads or rows % (32768 // self.d) or columns % 512 or (self.share + 2) * rows > NEURONS:
            return f"{self.heads} heads with {self.kv_heads} of K and V do not fall evenly on its programs"
        if self.d_ffn % PROGRAMS or own > NEURONS:
            return f"it takes neurons in a multiple of {PROGRAMS}, {NEURONS * PROGRAMS} at most, not {self.d_ffn}"
        if self.pages < LEAST_PAGES:
            return f"{self.layers} layers leave no room for its pages"
        return ""

    @property
    def defines(self) -> dict[str, int | str]:
        """Macros of the source. PAGE: bytes of a page. SMALL: bytes behind the pages, in front of the table of layers.
        EXCHANGE: words of a head, q/k/v and then attention's parts."""
        return {
            "D": self.d, "HEADS": self.heads, "KV_HEADS": self.kv_heads, "TEAMS": self.teams,
            "HEAD_DIM": self.head_dim, "D_FFN": self.d_ffn, "PAGES": self.pages, "LIST_PAGES": self.list_pages,
            "PAGE": self.page_bytes, "SMALL": self.small_bytes - self.layer_bytes * self.layers,
            "EXCHANGE": self.exchange, "MODE": int(self.neurons), "RANK": self.rank, "PREDICTOR_RELU": int(self.relu),
            "RMS_NORM": int(self.rms), "ROTARY": int(self.rotary), "BIASES": int(self.biases),
            "PARTLY": int(self.partly), "GATED": int(self.gated), "SQUARED": int(self.squared), "BOTH": int(self.both),
            "THRESHOLD": f"{float(self.threshold)!r}f",
        }  # fmt: skip
