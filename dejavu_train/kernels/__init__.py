"""Triton kernels of sparse decoding, each with its plain-torch reference. Rooms are links to those of `kernels/`.

Nothing here imports `dejavu_train` outside this package. Import modules by name: importing the package loads nothing.

Raises:
    ImportError: a checkout in which the rooms are text files instead of links.
"""

from pathlib import Path

if not Path(__file__).with_name("common").is_dir():
    raise ImportError(
        "dejavu_train/kernels/common is no folder: this checkout has text files where symbolic links should be;"
        " type git config core.symlinks true, then git checkout -- dejavu_train packages"
        " (on Windows in developer mode), or install a wheel",
        name=__name__,
    )
