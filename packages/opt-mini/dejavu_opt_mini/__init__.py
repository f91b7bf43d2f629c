"""opt-mini and its bundle of predictors, as folders.

>>> from dejavu_train import SparseOPTForCausalLM
>>> model = SparseOPTForCausalLM.from_pretrained(MODEL, BUNDLE)
"""

from pathlib import Path

MODEL = str(Path(__file__).parent / "model")
BUNDLE = str(Path(MODEL) / "bundle")
