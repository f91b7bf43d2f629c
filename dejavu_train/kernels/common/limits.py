"""Limits of kernels: sizes, rows and formats. Loads no Triton, so that a plan can be made where there is none."""

from enum import StrEnum

HEAD_DIMS = (16, 32, 64, 80, 128)
MOST_TOKENS = 8  # rows of a batch that multiply with 4-bit rows, or with nibbles of a predictor, as they are
ROW_LANES = 64  # threads of a program that selects for one row by nibbles
MOST_WORDS = 96  # of 4-bit rows of a predictor, for a lane
OWNED_ROWS = 256  # of a program that owns neurons, at most: its list of them lies in shared memory
OWNED_BYTES = 256  # of a predictor's numbers, for a thread of such a program
OWNERS, OWNERS_WARPS = 128, 8  # programs that own neurons and run at once on a large GPU, and their warps
SCREENED_WIDTHS = 16  # columns of a screened LM head are a multiple: a thread reads sixteen codes at once
TILE_ROWS = 16  # of q/k/v
TILED_FROM = 5121  # model dimensions from which all tiles of q/k/v are not there at once

SPARSE_CARVEOUT = 50  # percent of shared memory, see `launch.share_carveout`
INT4_CARVEOUT = 75  # where heads are selected and rows have 4 bits, whose queues lie in shared memory
DRIVERS_CARVEOUT = -1


class Products(StrEnum):
    """How the two matrices of a predictor are multiplied, see `stages.predict` and `stages.up_rows`."""

    REGISTERS = "rows in registers"
    ROW_WORDS = "rows in registers, then words of codes"
    ROW_TILES = "rows in registers, then tiles"
    TILES = "tiles of several rows"
    WORDS = "words of codes of several rows"

    @property
    def of_one_row(self) -> bool:
        """Whether the first half takes one row, and its LayerNorm with it."""
        return self not in (Products.TILES, Products.WORDS)


def word_vector(words: int) -> int:
    """V: words of a row that a lane reads at once."""
    return 4 if words % 16 == 0 else 2 if words % 2 == 0 else 1


def tokens_at_once(batch: int) -> int:
    """How many columns fc2's kernel has for tokens, a power of two."""
    return 1 if batch == 1 else 2 if batch == 2 else 4 if batch <= 4 else 8


def takes_down(group: int, d: int, batch: int) -> bool:
    """Whether `int4_fc2` multiplies rows of d columns in such groups.

    As many lane groups as tokens share a scale, four at most, and scales lie in pairs.
    """
    shared = 32 * min(4, tokens_at_once(batch))
    return 1 <= batch <= MOST_TOKENS and group % shared == 0 and d % (2 * group) == 0


def selection_block(d: int, batch: int) -> int:
    """Units of a block of a selection."""
    return 64 if batch > 1 or d <= 5120 else 32


def takes_row_words(rank: int, block: int, lanes: int) -> bool:
    """Whether a program of so many threads has room in its registers for `block` rows of nibbles of this rank."""
    rounds, vector = block // (lanes // 2), word_vector(rank // 8)
    words = 2 * rounds * vector * -(-rank // (32 * vector))
    return rank % 8 == 0 and block % (lanes // 2) == 0 and rounds in (1, 2, 4) and words <= MOST_WORDS


def owned_block(n: int, rank: int, size: int, programs: int, warps: int) -> int:
    """Rows that each of so many programs holds where they own n neurons, 0 where it has no room.

    size: bytes of a predictor's number, 0 = nibbles as words.
    """
    rows, threads = max(1 << (-(-n // programs) - 1).bit_length(), 16 * warps), 32 * warps
    fits = rows * rank * size <= OWNED_BYTES * threads if size else takes_row_words(rank, rows, threads)
    return rows if rows <= OWNED_ROWS and fits else 0


def takes_nibbles(rows: int, rank: int, d: int) -> bool:
    """Whether so many rows multiply with nibbles of a predictor of this rank as words of codes."""
    vector = word_vector(rank // 8)
    up = 2 * vector * -(-rank // (32 * vector))
    return 2 <= rows <= MOST_TOKENS and d % 8 == 0 and rank % 8 == 0 and up <= MOST_WORDS


def screen_bytes(n: int, d: int) -> int:
    """Bytes of a screen of n rows of d columns."""
    return n * (d + 12)
