"""Says where a model or a bundle lies: a folder as it was given, or what the hub's cache holds of OWNER/NAME.

Everything else reads that folder, so that what is compared, hashed and loaded are the same files.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.models.installed import CHECKPOINTS, hint, installed

SMALL_FILES = ("*.json", "*.txt", "*.model", "predictors/*")  # with a tokenizer and a bundle beside the model
KEYWORDS = ("revision", "cache_dir", "token", "local_files_only", "force_download")  # as in transformers


def looks_local(name: str) -> bool:
    """Whether a name can only be meant as a path. Every other one is OWNER/NAME on the hub unless it is a folder."""
    may_be_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII)
    return not may_be_id or name.startswith((".", f"{CHECKPOINTS}/")) or Path(name).parent.is_dir()


def in_hub_cache(folder: Path) -> bool:
    """Whether ``folder`` lies in a snapshot of a model in the hub's cache."""
    return any(
        part.parent.name == "snapshots" and part.parent.parent.name.startswith("models--")
        for part in (folder.absolute(), *folder.absolute().parents)
    )


def fetch(name: str, patterns: Iterable[str], failure: str, hub: Mapping[str, Any]) -> Path:
    """The snapshot of OWNER/NAME in the hub's cache, with the files of ``patterns`` that it has.

    Args:
        failure: how the error begins, such as "cannot fetch the weights of".
        hub: some of ``KEYWORDS``.
    Raises:
        UserError: no such repository or revision, no access, no network.
    """
    from huggingface_hub import snapshot_download  # takes a third of a second to import
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), **hub))
    except (HTTPError, OSError, ValueError) as error:
        raise UserError(f"{failure} {name}: {first_line(error)}") from None


def check_repository(repo_id: str) -> None:
    """Raise :class:`UserError` for a name that no repository of the hub can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no repository of the hub ({first_line(error)}); give OWNER/NAME") from None


def push(folder: Path, repo_id: str, what: str, **options: Any) -> str:
    """Upload a folder to a model repository of the hub, made if need be. Files of the repository stay but those.

    Args:
        repo_id: ``OWNER/NAME``, or ``NAME`` for the owner of the token.
        what: it is, for messages.
        options: ``private`` and ``token``, and of ``HfApi.upload_folder``.

    Returns:
        the address of the commit.

    Raises:
        UserError: no network, no access, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    private, given = options.pop("private", None), {key: each for key, each in options.items() if each is not None}
    try:
        api = HfApi(token=given.pop("token", None))
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **given))
    except (HTTPError, OSError) as error:
        raise UserError(
            f"cannot push {what} to {repo_id}: {first_line(error)}; check the network, the token"
            " (hf auth login) and HF_HUB_OFFLINE, or save_pretrained it and upload the folder from elsewhere"
        ) from None


def within(subfolder: str, files: Iterable[str]) -> list[str]:
    """The names or patterns of files of a subfolder, as the repository has them."""
    return [f"{subfolder.strip('/')}/{file}" if subfolder else file for file in files]


def model_folder(name: str, subfolder: str = "", **hub: Any) -> Path:
    """The folder of a model's files but the weights: ``name`` itself, or its snapshot in the hub's cache.

    Args:
        name: folder or hub id.
        subfolder: of the folder or repository.
        hub: some of ``KEYWORDS``.
    Raises:
        UserError: nothing there, no config.json in it, or as :func:`fetch`.
    """
    name = installed(name)
    folder = Path(name)
    if folder.is_dir():
        folder = folder / subfolder
    elif folder.exists():
        raise UserError(f"the model {name} is a file; give the folder that holds its config.json")
    elif looks_local(name):
        raise UserError(
            f"there is no model folder {name}; give a folder or a hub id such as facebook/opt-125m{hint(name)}"
        )
    else:
        folder = fetch(name, within(subfolder, SMALL_FILES), "cannot fetch the config of", hub) / subfolder
        if not (folder / "config.json").is_file():  # where the hub refuses, its client gives what the cache has
            raise UserError(
                f"cannot fetch the config of {name}: the hub has no config.json there, or refuses it; check the name,"
                " the token (hf auth login) and the network"
            )
    if not (folder / "config.json").is_file():
        raise UserError(f"the model folder {folder} has no config.json; give a folder written by save_pretrained")
    return folder
