"""Every stage of the kernels, with the settings that it looks up."""

import importlib
import pkgutil

import dejavu_train.kernels
from dejavu_train.kernels.common.settings import Settings

for module in pkgutil.walk_packages(dejavu_train.kernels.__path__, "dejavu_train.kernels."):
    importlib.import_module(module.name)
KINDS = dict(Settings.kinds)
