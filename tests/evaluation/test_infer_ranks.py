"""infer.py as several processes of torchrun."""

import json

import pytest
from rank_helpers import processes

import dejavu_train.evaluation.run  # noqa: F401  before processes are forked
from dejavu_train.evaluation.command import main, read_config
from dejavu_train.evaluation.ranks import check_ranks
from dejavu_train.ground.errors import UserError


def test_all_ranks_compute_and_the_first_one_prints(bundle_folder, tmp_path):
    def run(rank):
        flags = ["--tokens", "0", "--timing", "false", "--new_tokens", "8", "--generate", "the model reads"]
        main(["--bundle", str(bundle_folder), *flags, "--output", str(tmp_path / "results")])

    codes, said = processes(tmp_path, run)
    assert codes == [0, 0], said
    printed, nothing = ((tmp_path / f"stdout-{rank}").read_text() for rank in range(2))
    assert printed.startswith("the model reads") and not nothing and not said[1]
    assert json.loads((tmp_path / "results" / "results.json").read_text())["timing"] == []


def test_a_mistake_is_one_line_of_the_first_rank(bundle_folder, tmp_path):
    def run(rank):
        main(["--bundle", str(bundle_folder), "--tokens", "0", "--timing", "false", "--generate", "a " * 600])

    codes, said = processes(tmp_path, run)
    errors = [line for each in said for line in each if "error" in line]
    assert set(codes) <= {2, 3} and len(errors) == 1 and "--generate: the prompt has" in errors[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "scores nothing: give --tokens 0"),
        (["--tokens", "0", "--guard.every", "4", "--generate", "a"], "without --guard.every"),
        (["--tokens", "0", "--backend", "gather", "--generate", "a"], "auto, triton, dense-engine, got gather"),
        (["--tokens", "0", "--timing_backends", "mask"], "dense-engine, triton, got mask"),
    ],
)
def test_what_several_processes_do_not_do_is_said_in_a_line(bundle_folder, flags, words):
    with pytest.raises(UserError, match=words):
        check_ranks(read_config(["--bundle", str(bundle_folder), *flags]))
