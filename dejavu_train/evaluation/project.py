"""The name of a project of Weights & Biases, looked at before there is anything to log."""

from dejavu_train.ground.errors import UserError


def check_project(name: str) -> None:
    """Raise :class:`UserError` for a project that wandb would refuse when everything has been measured."""
    import wandb

    try:
        wandb.Settings(project=name)
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--wandb {name!r} cannot be a project's name: {reason}") from None
    if not name.strip():
        raise UserError("--wandb is empty; name a project")
