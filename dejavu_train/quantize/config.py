"""The keys of quantising a model, with their defaults. Readable without torch."""

import dataclasses
from typing import Any, Literal

from dejavu_train.data.text import TextSource
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, SEED, Range, check_ranges
from dejavu_train.models.installed import installed

LEAST_PER_INPUT = 10  # calibration tokens; fewer leave second moments that say little
DEFAULT_TOKENS = 128_000
# Options of 0.2, of gptq. An error in a head may be undone by others, and biases take over what rounding does to means.
CONSTANTS: dict[str, Any] = {"damp_own": 0.0, "act_order": False, "out_hessian": "full", "correct_bias": True}


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """A model's matrices in 4 bits, written as a model folder of its own."""

    CONSTANTS = CONSTANTS

    model: str = "checkpoints/opt-mini"
    """Folder or hub id. Its weights in fp16, bf16 or fp32, or quantised by GPTQ, AWQ, compressed-tensors or
    bitsandbytes (NF4), which are converted."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    output: str = "checkpoints/int4"
    """Folder that is made. It must not exist."""
    quantizer: Literal["gptq", "rtn"] = "gptq"
    """gptq changes the model's outputs on calibration text least. rtn rounds to the nearest codes, without text."""
    text: TextSource = dataclasses.field(default_factory=TextSource)
    """Calibration text, of which the set train is read. By default the model's own samples."""
    tokens: int | None = None
    """Calibration tokens. null: 128,000, or 10 for each neuron of a layer where that is more."""
    window: int = 512
    """Tokens of a sequence, the leading </s> included."""
    batch_size: int = 8
    """Sequences per forward pass."""
    damp_mean: float = 0.01
    """Share of the mean of the second moments' diagonal that gptq adds to the diagonal."""
    lm_head: Literal["fp16", "int8", "int4"] = "fp16"
    """fp16 leaves the LM head as it is. int8 (to nearest) and int4 (by the quantizer) store it in codes of its own.
    Embeddings to which it is tied stay as they are. The decode engine of a GPU reads fp16 and int4."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of the choice of calibration text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", installed(self.model))

    def check(self, shape: ModelDims) -> None:
        """Raise :class:`UserError` for a value out of range, or one that the model does not allow."""
        least = Range(2, COUNT.most)
        ranges = {"tokens": least, "window": least, "batch_size": COUNT, "damp_mean": NUMBER}
        check_ranges(self, "", ranges | {"seed": SEED})
        self.text.check()
        if self.gptq and self.window > shape.max_positions:
            raise UserError(
                f"--window is {self.window}, but {self.model} has {shape.max_positions} positions; give --window"
                f" {shape.max_positions}, or --quantizer rtn, which reads no text"
            )
        needed = LEAST_PER_INPUT * max(shape.d_model, shape.d_ffn)
        if self.gptq and self.calibration_tokens(shape) < needed:
            raise UserError(
                f"--tokens is {self.tokens}: gptq needs {LEAST_PER_INPUT} tokens for each input of a matrix,"
                f" {needed:,} for {self.model}; give more, or --quantizer rtn"
            )

    @property
    def gptq(self) -> bool:
        return self.quantizer == "gptq"

    def calibration_tokens(self, shape: ModelDims) -> int:
        return self.tokens or max(DEFAULT_TOKENS, LEAST_PER_INPUT * max(shape.d_model, shape.d_ffn))
