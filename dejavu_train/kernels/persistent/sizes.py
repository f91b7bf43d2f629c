"""Sizes for which the kernel of all layers is compiled, and which there are. Loads no torch."""

from dataclasses import dataclass
from enum import IntEnum

PROGRAMS, THREADS = 128, 288
HEADS = 32  # of four programs each
GROUP = 128  # columns of a scale
WIDTHS, HEAD_DIMS, RANKS = (2048, 4096), (64, 128), (128, 256)
NEURONS = 128  # of a program, at most
SMALL_BYTES, LAYER_BYTES, GATE_BYTES = 20480, 200, 24  # beside the pages: of a program, of a layer and of its gate
SHARED_BYTES = 232448  # of a multiprocessor that a program can have
MOST_PAGES, LEAST_PAGES = 12, 6
EXCHANGE, SYNC = 1280, 16 * 32  # words


class Neurons(IntEnum):
    """Mode: which rows of an MLP a step reads."""

    ALL = 0
    LIVE = 1
    SELECTED = 2

    @property
    def words(self) -> str:
        return ("all neurons", "up, and down of the neurons that are not zero", "the selected neurons")[self]


@dataclass(frozen=True)
class StepSizes:
    """Sizes for which the kernel is compiled, and what its layers compute. Without more they are OPT's.

    rank: of the MLPs' predictors, 0 = none. relu: within these.
    rms: norms are RMSNorm. rotary: q and k are turned. biases: linear maps have them. The first of an MLP always does.
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
    rms: bool = False
    rotary: bool = False
    biases: bool = True
    gated: bool = False
    squared: bool = False
    both: bool = False
    threshold: float = 0.0

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's row in the table of tensors."""
        return LAYER_BYTES + GATE_BYTES * self.gated

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: 16 KB of rows, their scales, and room between them."""
        rows = 16384 // (self.d // 2)
        return 16384 + rows * (16 + self.d // 64)

    @property
    def pages(self) -> int:
        """Pages of the ring that fit beside the table of layers."""
        return min(MOST_PAGES, (SHARED_BYTES - self.small_bytes) // self.page_bytes)

    @property
    def small_bytes(self) -> int:
        """Bytes beside the pages: sums of every column, what programs tell each other, and the table of layers."""
        return SMALL_BYTES + 4 * (self.d + self.d // 8) + self.layer_bytes * self.layers

    @property
    def refusal(self) -> str:
        """Why the kernel does not take these sizes, or ""."""
        own = self.d_ffn // PROGRAMS
        for what, got, allowed in (
            ("a width", self.d, WIDTHS),
            ("heads", self.heads, (HEADS,)),
            ("a head dim", self.head_dim, HEAD_DIMS),
            *((("a predictor's rank", self.rank, RANKS),) if self.neurons is Neurons.SELECTED else ()),
        ):
            if got not in allowed:
                return f"it takes {what} of {' or '.join(map(str, allowed))}, not {got}"
        if self.heads * self.head_dim != self.d:
            return "it takes heads that are as wide as the model together"
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
            "D": self.d, "HEADS": self.heads, "HEAD_DIM": self.head_dim, "D_FFN": self.d_ffn, "PAGES": self.pages,
            "PAGE": self.page_bytes, "SMALL": self.small_bytes - self.layer_bytes * self.layers, "EXCHANGE": EXCHANGE,
            "MODE": int(self.neurons), "RANK": self.rank, "PREDICTOR_RELU": int(self.relu),
            "RMS_NORM": int(self.rms), "ROTARY": int(self.rotary), "BIASES": int(self.biases),
            "GATED": int(self.gated), "SQUARED": int(self.squared), "BOTH": int(self.both),
            "THRESHOLD": f"{float(self.threshold)!r}f",
        }  # fmt: skip
