"""The one parser: files over files, flags over all, lists, mappings, and mistakes in one line."""

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
import typing

import pytest
from conftest import REPOSITORY

from dejavu_train.cli.parser import parse
from dejavu_train.cli.values import merged
from dejavu_train.evaluation.command import read_config
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.extras.generation.run import read_config as read_generation
from dejavu_train.ground.errors import UserError
from dejavu_train.run.command import parse_config
from dejavu_train.training.config import LOSSES, RunConfig
from papers.deja_vu.observe.__main__ import read_config as read_observe

CONFIGS = REPOSITORY / "configs"


@pytest.fixture
def write(tmp_path):
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return file


def test_a_flag_that_is_not_utf_8():
    for flags in (["--generate", os.fsdecode(b"a\xff")], [os.fsdecode(b"--output=\xff")]):
        with pytest.raises(UserError, match=r"udcff' is not UTF-8"):
            read_config(flags)


def test_later_files_win_and_flags_win_over_all(write):
    one = write("one.yaml", "seed: 1\nmlp: {rank: 5, steps: 7, ranks: {0: 3}}\ntrainer: {precision: 16-mixed}")
    two = write("two.yaml", "mlp: {rank: 6, ranks: {1: 4}}\ntrainer: {max_epochs: 2}")
    config = parse_config(["--mlp.learning_rate", "1e-3", "--config", one, "--seed=3", "--config", two])
    assert (config.seed, config.mlp.rank, config.mlp.steps, config.mlp.learning_rate) == (3, 6, 7, 1e-3)
    assert config.mlp.ranks == {0: 3, 1: 4} and [config.mlp.rank_of(layer) for layer in range(3)] == [3, 4, 6]
    assert config.trainer == {"devices": 1, "precision": "16-mixed", "max_epochs": 2}
    assert parse_config(["--config", one, two]) == parse_config(["--config", one, "--config", two])


def test_null_is_a_value_only_where_it_may_be_one(write):
    for text, name in (
        ("output: null", "--output"),
        ("text: {source: null}", "--text.source"),
        ("bundle: null", "--bundle"),
    ):
        with pytest.raises(UserError, match=f"{name} must be .*, got null"):
            parse_config(["--config", write("null.yaml", text)])
    assert parse_config(["--config", write("null.yaml", "revision: null")]).revision is None


def test_a_file_names_its_base(write):
    write("base.yaml", "seed: 4\nmlp: {rank: 5}")
    own = write("own.yaml", "base: base.yaml\nmlp: {steps: 9}")
    config = parse_config(["--config", own])
    assert (config.seed, config.mlp.rank, config.mlp.steps) == (4, 5, 9)
    with pytest.raises(UserError, match=r"no config file .*nowhere.yaml"):
        parse_config(["--config", write("own.yaml", "base: nowhere.yaml")])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("opt-*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_says_only_what_differs(path):
    alone = parse_config(["--config", str(path)])
    assert parse_config(["--config", str(CONFIGS / "base.yaml"), "--config", str(path)]) == alone
    assert alone.calibrate.dtype == "int4" and alone.heads.init == "small" and alone.trainer["logger"]


UNPARSED = {"...", "--help", "my_run.yaml", "$rank"}  # a command with one of these is not tried


def _commands(command: str = r"python (?:train|infer)\.py") -> list[list[str]]:
    """Commands, those of train.py and infer.py, in README, Makefile, cards and docs."""
    docs = [path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "notes"]  # notes: of the past
    files = [REPOSITORY / "README.md", REPOSITORY / "Makefile", *docs]
    files += [REPOSITORY / "checkpoints/opt-mini/README.md", *CONFIGS.rglob("*.yaml")]
    files += (REPOSITORY / "papers").rglob("*.yaml")
    found = []
    for path in files:
        text = re.sub(r"\\\n\s*", "", path.read_text())  # lines that go on
        text = re.sub(r'--wrap "([^"]*)"', r"\1", text.replace("$(DEMO)", "checkpoints/demo"))
        found += re.findall(rf"{command}(?= )[^`\n;|]*", text)
    return [shlex.split(line.rstrip(".,").removeprefix("python ")) for line in found]


def test_every_command_of_the_documentation_parses():
    commands = _commands()
    assert sum(words[0] == "train.py" for words in commands) >= 3 <= sum(words[0] == "infer.py" for words in commands)
    for name, *flags in commands:
        flags = [flag for flag in flags if flag != "--check"]
        if UNPARSED & set(flags) or "--text" in flags and name == "train.py":
            continue
        (parse_config if name == "train.py" else read_config)(flags)


def test_every_command_of_evaluation_in_the_documentation_parses():
    parsers = {r"python -m papers\.deja_vu\.observe": read_observe, "dejavu generation": read_generation}
    try:
        from dejavu_train.extras.tasks.config import TasksConfig
        from dejavu_train.extras.tasks.run import read_config as read_tasks
        from papers.deja_vu.tables import read_config as read_tables
    except ImportError:
        pass  # without the extra eval
    else:
        for command in ("dejavu tasks", r"python -m benchmarks\.tasks"):
            parsers[command] = lambda flags: read_tasks(TasksConfig, flags, "")
        parsers[r"python -m papers\.deja_vu\.(?:tables|record)"] = read_tables
    for command, read in parsers.items():
        commands = [words for words in _commands(command) if words[-1] != "picture"]
        assert commands, command
        for _, _, *flags in commands:
            read(flags)


def test_names_come_with_commas_or_repeated_and_none_is_empty():
    read = read_observe(["--parts", "residual,units", "--parts", "union", "--ef", "9,", "--losses=0.1,0.2"])
    assert read.parts == ("residual", "units", "union") and read.ef == (9,) and read.losses == (0.1, 0.2)
    for empty in (["--ef", "[]"], ["--ef="], ["--ef", ""], ["--ef=[]"]):
        assert read_observe(empty).ef == ()
    assert read_observe(["--parts=[residual, union]"]).parts == ("residual", "union")


def test_an_option_that_moved_names_its_command(write):
    for options in (["--observe"], ["--observe.tokens", "3"], ["--config", write("old.yaml", "observe: {tokens: 3}")]):
        with pytest.raises(
            UserError, match="observe.*, which is no longer there; type python -m papers.deja_vu.observe --config"
        ):
            read_config(options)


def test_an_option_that_is_a_constant_now_may_name_its_value(write):
    """As a config file of 0.2 does, which spelled all options out."""
    old = write("old.yaml", "collect: {mean_tokens: 8192}\nmlp: {monitor: retained_mass}")
    assert parse_config(["--config", old, "--heads.warmup=0.05"]) == parse_config([])
    said = "mlp.monitor is no option any more, it is always retained_mass, got recall; leave it out"
    for flags in (["--mlp.monitor", "recall"], ["--config", write("old.yaml", "mlp: {monitor: recall}")]):
        with pytest.raises(UserError, match=said):
            parse_config(flags)


def test_lists_come_with_commas_and_files_one_by_one():
    config = read_config(["--mlp_density", "0.1,0.3", "--timing_backends=triton", "--curve_mlp_density", ""])
    assert config.mlp_density == (0.1, 0.3) and config.timing_backends == ("triton",) and config.curve_mlp_density == ()
    assert read_config(["--mlp_density=[0.2]", "--text", "a,b.txt", "c.txt", "--text=d.txt"]).text == (
        "a,b.txt", "c.txt", "d.txt"
    )  # fmt: skip
    assert parse_config(["--calibrate.dense_layers", "0,3"]).calibrate.dense_layers == (0, 3)


def test_the_trainers_flags_are_a_mapping():
    flags = ["--trainer.max_time", "10:00:00:00", "--trainer.devices=2", "--trainer.strategy", "ddp"]
    flags += ["--trainer.logger=CSVLogger", "--trainer.logger.flush_logs_every_n_steps=5", "--trainer={precision: 16}"]
    assert parse_config(flags).trainer == {
        "max_time": "10:00:00:00",
        "devices": 2,
        "strategy": "ddp",
        "logger": {"class_path": "CSVLogger", "init_args": {"flush_logs_every_n_steps": 5}},
        "precision": 16,
    }


def test_a_parser_is_kept_and_no_config_is_another_ones():
    """Values that can be changed are copies."""
    flags = ["--model=a", "--mlp.ranks={0: 3}", "--trainer.devices=2"]
    expected = [parse_config([]).to_json(), parse_config(flags).to_json()]
    for config in (parse_config([]), parse_config(flags)):
        config.trainer["devices"] = config.mlp.ranks[0] = config.resources["gpus"] = 7
    assert [parse_config([]).to_json(), parse_config(flags).to_json()] == expected
    with pytest.raises(UserError, match="--seed must be"):
        parse_config(["--seed=x"])
    assert [parse_config([]).to_json(), parse_config(flags).to_json()] == expected


def test_docstrings_are_read_for_help_alone(monkeypatch, capsys):
    """They come from the source, and take longer than all else that a parser does."""

    @dataclasses.dataclass(frozen=True)
    class Asked:
        number: int = 3
        """What is asked."""

    read = []
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda found: read.append(found) or getsource(found))
    assert parse(Asked, ["--number=4"], "x.py", "Does it.").number == 4 and not read
    with pytest.raises(SystemExit):
        parse(Asked, ["--help"], "x.py", "Does it.")
    assert read == [Asked]


def test_merging():
    below = {"a": {"x": 1, "y": [1]}, "b": {"class_path": "A", "init_args": {"k": 1}}}
    above = {"a": {"y": [2]}, "b": {"class_path": "B"}}
    assert merged(below, above) == {"a": {"x": 1, "y": [2]}, "b": {"class_path": "B"}}
    assert below["a"]["y"] == [1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--text"], "unknown option --text without a value; write --text FILE"),
        (["--mlp.rnk=3"], "unknown option --mlp.rnk; did you mean mlp.rank?"),
        (["--mlp.ran=3"], "unknown option --mlp.ran"),  # not taken as an abbreviation
        (["--mlp.rank=three"], "--mlp.rank must be a whole number, got three"),
        (["--mlp.rank=1.5"], "--mlp.rank must be a whole number, got 1.5"),
        (["--mlp.rank"], "--mlp.rank needs a value"),
        (["--mlp.bias=perhaps"], "--mlp.bias must be true or false, got perhaps"),
        (["--mlp.learning_rate=.nan"], "--mlp.learning_rate must be a finite number"),
        (["--calibrate.dense_layers=a"], "--calibrate.dense_layers must be a list, each item a whole number"),
        (["--calibrate.dtype=int3"], "--calibrate.dtype must be one of float32, float16, bfloat16, int8, int4, got"),
        (["--collect.train_tokens=-5"], "collect.train_tokens must be at least 2, got -5"),
        (["--mlp={rank: 3}"], "unknown option --mlp"),
        (["--plan", "true"], "unknown option --plan with a value; its keys are options, such as --plan.gpu"),
        (["--trainer.a=1", "--trainer.a.b=2"], "a holds 1, which has no b"),
        (["extra"], "expected an option such as --name, got extra"),
        (["--config=nowhere.yaml"], "there is no config file nowhere.yaml"),
        (["--config"], "--config needs a value: a YAML file"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_config(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlp: {rnk: 3}", "has the unknown key mlp.rnk; did you mean mlp.rank?"),
        ("mlp: 3", "mlp must hold keys and values, got 3"),
        ("trainer: true", "trainer must hold keys and values, got True"),
        ("mlp: {predictor: [1]}", "mlp.predictor must hold keys and values, got [1]"),
        ("mlp: [unclosed", "is not readable YAML"),
        ("- 1", "must hold keys and values"),
        ("mlp: {rank: three}", "--mlp.rank must be a whole number, got three"),
        ("mlp: {rank: 8}\nmlp: {steps: 5}", "has mlp twice; write it once, with all that is below it"),
        ("mlp:\n  rank: 8\n  rank: 9", "has mlp.rank twice"),
        ("base: ./mine.yaml", "mine.yaml is its own base, named by"),
        ("base: ''", "base must name another YAML file, got"),
        ("base: 3", "base must name another YAML file, got"),
    ],
)
def test_mistakes_in_a_file(write, text, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_config(["--config", write("mine.yaml", text)])
    assert "Parser key" not in str(caught.value)


def test_two_files_that_name_each_other_are_told(write):
    write("one.yaml", "base: other.yaml")
    other = write("other.yaml", "base: one.yaml")
    with pytest.raises(UserError, match=r"other.yaml is its own base, named by .*one.yaml; name another one there"):
        parse_config(["--config", other])


@pytest.mark.parametrize("kind", [RunConfig, InferConfig])
def test_help_says_what_every_field_is(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(kind, ["--help", "all"], "x.py", "Does it.")
    assert caught.value.code == 0
    options = re.split(r"\n  --", capsys.readouterr().out)[1:]
    described = {option.split()[0]: " ".join(option.split()[1:]) for option in options}
    for name in _leaves(kind):
        assert re.search(r"[a-z]{3,}", re.sub(r"^{[^}]*}", "", described[name])), name


@pytest.mark.parametrize("kind", [RunConfig, InferConfig])
def test_help_shows_examples_and_common_options_first_and_groups_by_name(kind, capsys):
    def shown(*asked):
        with pytest.raises(SystemExit):
            parse(kind, ["--help", *asked], "x.py", "Does it.")
        text = capsys.readouterr().out
        return text, re.findall(r"^  --([\w.]+)", text, re.M)

    text, common = shown()
    assert common[: len(kind.COMMON)] == list(kind.COMMON) and len(text.splitlines()) < 80
    assert 3 <= len(kind.EXAMPLES) <= 4 and all(f"  {example}\n" in text for example in kind.EXAMPLES)
    groups = re.findall(r"^  ([a-z.]+)  ", text[text.index("more options") :], re.M)
    listed = [option for name in groups for option in shown(name)[1]]
    everything = {*_leaves(kind)}
    assert {*listed, *common} - {"config", "print_config"} == everything and len(listed) == len(set(listed))
    assert {name for _, names in kind.GROUPS.values() for name in names} <= everything
    with pytest.raises(UserError, match="--help sped: there is no such group of options; there are all, "):
        parse(kind, ["--help", "sped"], "x.py", "Does it.")


def _leaves(kind, prefix=""):
    for name, hint in typing.get_type_hints(kind).items():
        section = next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if section is not None:
            yield from _leaves(section, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_names_that_stand_twice_agree():
    """The configurations cannot import what loads torch, so they repeat a few names."""
    from dejavu_train.bundle.spec import PREDICTOR_DTYPES
    from dejavu_train.calibration.config import PredictorDtype
    from dejavu_train.data.text import SETS
    from dejavu_train.evaluation.timing import ON_CPU, ON_GPU
    from dejavu_train.predictors import losses
    from dejavu_train.sparse.runtime import BACKENDS

    hints = typing.get_type_hints(InferConfig)
    assert tuple(losses.LOSSES) == LOSSES and typing.get_args(PredictorDtype) == PREDICTOR_DTYPES
    assert TEXT_SET in SETS
    known = typing.get_args(hints["backend"])
    assert set(known) == {"dense", *BACKENDS, *ON_GPU[1:], *ON_CPU[1:]}
    assert {*typing.get_args(typing.get_args(hints["timing_backends"])[0])} == {*known, *ON_GPU, *ON_CPU} - {"auto"}


MISTAKEN = """
train.py --mlp.rnk 3
train.py --config configs/opt-mini.yaml --calibrate.mlp_density=-1
train.py --model ./nowhere
infer.py --tokens=-3
infer.py --model ./nowhere
infer.py --bundle ./nowhere
train.py --layers 0-99999999
train.py --mlp.learning_rate 1e30
train.py --text.source nowhere.txt
train.py --calibrate.budget 5% --calibrate.sensitivity_tokens 0
train.py --collect.device meta
"""
TOLD = f"""
import runpy, sys
for command in {MISTAKEN.split(chr(10))[1:-1]}:
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code, *{{"torch", "lightning", "transformers"}} & set(sys.modules))
"""


def test_mistakes_are_told_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", TOLD], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()
    assert done.stdout.split("\n") == ["2"] * len(said) + [""] and len(said) == MISTAKEN.count(".py")
    assert all(line.startswith("error: ") for line in said), said


def test_dashes_within_a_name_are_underscores():
    from dejavu_train.extras.serving.config import ServeConfig

    argv = ["--bundle", "b", "--allow-origin", "https://a.example", "--api-key=a-b", "--log", "a-b"]
    config = parse(ServeConfig, argv, "dejavu serve", "")
    assert (config.allow_origin, config.api_key, config.log) == (("https://a.example",), "a-b", "a-b")
    with pytest.raises(UserError, match="unknown option --api-kee; did you mean api_key"):
        parse(ServeConfig, ["--api-kee", "x"], "dejavu serve", "")
