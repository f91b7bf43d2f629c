"""What each engine runs beside an OPT: values of the fields of `ModelDims`. Loads no torch."""

from dejavu_train.families.dims import Runs

GPU: Runs = {}
CPU: Runs = {}
