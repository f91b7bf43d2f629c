"""Where names of OPT's modules and classes may stand in the library."""

import re

from conftest import REPOSITORY

WORDS = re.compile(r"(?<!Sparse)\bOPTForCausalLM\b|\bfc1\b|\bfc2\b|\bdecoder\.layers\b|\bself_attn_layer_norm\b")
ALLOWED = {
    "families/opt.py": "the family",
    "families/cosmos3_edge.py": "whose MLP has the same names",
    "families/nanochat.py": "whose MLP has the same names",
    "sparse/model.py": "the public class SparseOPTForCausalLM",
}


def test_names_of_opt_stand_in_its_family():
    library = REPOSITORY / "dejavu_train"
    paths = [path for path in library.rglob("*.py") if not path.is_relative_to(library / "kernels")]
    found = {str(path.relative_to(library)) for path in paths if WORDS.search(path.read_text())}
    assert found == set(ALLOWED)
