"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As in the metadata of the installation. ``unknown`` where the sources run without one."""
    try:
        return version("dejavu-train")
    except PackageNotFoundError:
        return "unknown"
