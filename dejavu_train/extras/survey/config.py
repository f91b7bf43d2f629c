"""The keys of a survey, with their defaults. Readable without torch."""

import dataclasses
from pathlib import Path

from dejavu_train.data.text import INSTALLED
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.shared_config import TextOptions
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, SEED, SHARE, Range, check_ranges
from dejavu_train.models.installed import installed


@dataclasses.dataclass(frozen=True)
class SurveyConfig(TextOptions):
    """Gain of a model, if the best neurons and heads of every token were known. Nothing is trained."""

    EXAMPLES = (
        "dejavu survey --model checkpoints/opt-mini                      a minute",
        "dejavu survey --model meta-llama/Llama-3.2-1B --text my.txt     on a text of yours",
    )

    model: str = ""
    """Folder, hub id or .gguf file of any causal language model of transformers."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    text: tuple[str, ...] = INSTALLED[:3]
    """SOURCE or NAME=SOURCE, one or several: installed-..., a .txt or .jsonl file, a hub dataset."""
    text_cache: str = "checkpoints/text"
    """Folder where installed texts are cached."""
    tokens: int = 2304
    """How many are scored, of all texts together."""
    window: int = 129
    """Tokens of a sequence, the leading start token included."""
    neuron_shares: tuple[float, ...] = (0.5, 0.3, 0.2, 0.1, 0.05)
    """Shares of the neurons that the oracle keeps for each token."""
    head_shares: tuple[float, ...] = (0.85, 0.5)
    """Shares of the head groups that the oracle keeps for each token."""
    output: str = ""
    """Folder of results. Empty: checkpoints/survey/NAME."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if not self.output:
            name = Path(self.model).stem if self.model.endswith(".gguf") else Path(self.model).name
            object.__setattr__(self, "output", str(Path("checkpoints/survey") / name))
        object.__setattr__(self, "model", installed(self.model))

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        if not self.model:
            raise UserError("a survey needs a model; give --model FOLDER, a hub id or a .gguf file")
        shares = dict.fromkeys(("neuron_shares", "head_shares"), SHARE)
        check_ranges(self, "--", shares | {"tokens": COUNT, "window": Range(2, COUNT.most), "seed": SEED})
        if self.tokens < self.window - 1:
            raise UserError(f"--tokens must be at least --window - 1, {self.window - 1}, got {self.tokens}")
        name_texts(self.text)
