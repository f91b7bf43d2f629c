"""Origin of a result: versions of the packages, hashes of the weights and of the bundle."""

import datetime
import platform
import secrets
from pathlib import Path

import torch
import transformers

from dejavu_train.bundle.folder import METADATA
from dejavu_train.ground.files import read_json
from dejavu_train.models.load import weight_hash


def versions() -> dict[str, str]:
    """Versions of python and of the packages that decide numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def new_run() -> dict[str, str]:
    """A name for the rows of one invocation, which no other has, and when it began (UTC)."""
    now = datetime.datetime.now(datetime.UTC)
    return {"id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", "date": now.isoformat(timespec="seconds")}


def hashes(model: str, revision: str | None, bundle: str | None) -> dict[str, str | None]:
    """``model``: of the stored weights, see :func:`weight_hash`. ``bundle``: of its metadata, which names its tensors'.

    None for a bundle that is no folder here, and where there is none.
    """
    metadata = Path(bundle) / METADATA if bundle else None
    bundle_hash = read_json(metadata, "the bundle")["sha256"] if metadata is not None and metadata.is_file() else None
    return {"model": weight_hash(model, revision=revision), "bundle": bundle_hash}
