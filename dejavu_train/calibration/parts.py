"""Orders to processes that calibrate by layers, each a range of the windows: a plan in files of the stage's folder.

FOLDER/plan.json         the model and how it runs, the windows, and of each probe what is no tensor
FOLDER/plan.safetensors  tensors of probes by their number, ``means.LAYER``
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from dejavu_train.bundle.spec import CASCADE_PARTS
from dejavu_train.calibration.sensitivity import SensitivityProbe
from dejavu_train.families import LayerInput, Site, Target, UnitKey
from dejavu_train.ground.files import read_json, replacing, write_json
from dejavu_train.predictors.low_rank import LowRankPredictor

PLAN = "plan"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A stage of a calibration by layers.

    Attributes:
        windows: token ids.
        probes: of sensitivities, or the predictors of heads with what they read.
        means: by layer (n, e), what stands in for skipped heads.
    """

    windows: Sequence[Sequence[int]]
    probes: Mapping[UnitKey, SensitivityProbe]
    means: Mapping[int, Tensor]

    @property
    def is_shareable(self) -> bool:
        """Whether files can hold it. Predictors of a class of yours stay in their process."""
        return all(type(probe.predictor) is LowRankPredictor for probe in self.probes.values())

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write it, the JSON last.

        Args:
            about: JSON, the model and how it runs.
        """
        tensors = {f"means.{layer}": mean for layer, mean in self.means.items()}
        rows = []
        for i, (key, probe) in enumerate(self.probes.items()):
            used: Any = probe.predictor
            rows.append({
                "layer": key[0], "target": str(key[1]), "site": [probe.site.layer, str(probe.site.input)],
                "thresholds": list(probe.thresholds), "nonlinearity": used.nonlinearity, "rounded_to": used.rounded_to,
            })  # fmt: skip
            own = dict(used.state_dict()) | ({} if probe.mean is None else {"mean": probe.mean})
            if probe.cascade is not None:
                own |= dict(zip(CASCADE_PARTS, probe.cascade, strict=True))
            tensors |= {f"{i}.{name}": tensor for name, tensor in own.items()}
        with replacing(folder / f"{PLAN}.safetensors") as path:
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
        windows = [list(map(int, window)) for window in self.windows]
        write_json(folder / f"{PLAN}.json", {"about": dict(about), "windows": windows, "probes": rows})

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        """Read what :meth:`save` wrote."""
        stored, tensors = read_plan(folder), load_file(folder / f"{PLAN}.safetensors")
        probes = {}
        for i, row in enumerate(stored["probes"]):
            own = {name.partition(".")[2]: each for name, each in tensors.items() if name.startswith(f"{i}.")}
            rank, d_in = own["down"].shape
            used = LowRankPredictor(d_in, rank, len(own["up"]), row["nonlinearity"], "bias" in own)
            used.load_state_dict({name: own[name] for name in used.state_dict()})
            used.rounded_to = row["rounded_to"]
            cascade = [own[name] for name in CASCADE_PARTS if name in own]
            site = Site(row["site"][0], LayerInput(row["site"][1]))
            probe = SensitivityProbe(
                used.requires_grad_(False).eval(), site, row["thresholds"], own.get("mean"), cascade or None
            )
            probes[UnitKey(row["layer"], Target(row["target"]))] = probe
        named = {name.partition("means.")[2]: mean for name, mean in tensors.items() if name.startswith("means.")}
        return cls(stored["windows"], probes, {int(layer): mean for layer, mean in named.items()})


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan's JSON."""
    made: dict[str, Any] = read_json(folder / f"{PLAN}.json", "the plan of calibrating")
    return made
