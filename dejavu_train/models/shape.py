"""Earlier names of what ``families`` and ``models.config_values`` hold, for programs that were written for 0.1."""

from dejavu_train.families import ModelDims as OPTShape
from dejavu_train.models.config_values import read_dims as read_shape
from dejavu_train.models.config_values import read_values

__all__ = ["OPTShape", "read_shape", "read_values"]
