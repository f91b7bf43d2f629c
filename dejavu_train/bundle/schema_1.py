"""What a bundle of schema 1 called otherwise."""

import re
from typing import Any

from torch import Tensor


def from_schema_1(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Its metadata and its tensors under the names of now."""
    specs = [
        {"stage2_retained_mass" if name == "passes" else name: value for name, value in spec.items()}
        for spec in metadata["entries"]
    ]
    renamed = {re.sub(r"\.bar$", ".stage2_threshold", name): tensor for name, tensor in tensors.items()}
    return metadata | {"predictors": specs, "metadata": metadata["facts"]}, renamed
