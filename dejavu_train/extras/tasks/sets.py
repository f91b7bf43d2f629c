"""Sets that are answered at length, with the prompts, stop strings, filters and scorers of lm-eval.

Two have parts of their own. HumanEval runs programs in ``programs.py``, since lm-eval's way fetches code from the hub.
Haystacks are made here in RULER's form: lm-eval's maker fetches data, and runs code that comes with a tokenizer.
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import nltk
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

from dejavu_train.extras.tasks.local_files import Record, read_records
from dejavu_train.extras.tasks.programs import passes
from dejavu_train.extras.tasks.tasks import Questions, fetched, quiet
from dejavu_train.ground.errors import UserError, first_line


def judge_program(doc: Record, results: list[str]) -> dict[str, float]:
    """Tell whether a function that was completed passes its problem's tests."""
    return {"passed": float(passes(f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})"))}


def judge_found(doc: Record, results: list[str]) -> dict[str, float]:
    """Tell whether an answer has the number that was asked for."""
    return {"found": string_match_all(postprocess_pred(results), [doc["outputs"]])}


@dataclass(frozen=True)
class LongSet:
    """A set of lm-eval.

    Attributes:
        file: its configuration. metric: of a sample, what counts as right.
        needs: fields of a record, the question first.
        judge: stands in for lm-eval's own scorer.
        plain: asked as plain text, whatever template for chats there is.
    """

    file: str
    metric: str
    needs: tuple[str, ...]
    judge: Callable[[Record, list[str]], dict[str, float]] | None = None
    plain: bool = False


SETS = {
    "gsm8k": LongSet("gsm8k/gsm8k.yaml", "exact_match", ("question", "answer")),
    "math500": LongSet("minerva_math/minerva_math500.yaml", "math_verify", ("problem", "solution")),
    "ifeval": LongSet(
        "ifeval/ifeval.yaml", "prompt_level_strict_acc", ("prompt", "key", "instruction_id_list", "kwargs")
    ),
    "humaneval": LongSet(
        "humaneval/humaneval.yaml", "passed", ("prompt", "test", "entry_point"), judge_program, plain=True
    ),
    "retrieval": LongSet("ruler/niah_single_1.yaml", "found", ("input",), judge_found),
}
SEED = 1234  # of worked examples, as lm-eval's own
COUNTED = ("length_constraints:number_sentences", "change_case:capital_word_frequency")  # by nltk's data


def load_set(name: str, folder: str | None, made: Callable[[], list[Record]] | None = None) -> Any:
    """A set as a task of lm-eval.

    Args:
        folder: of NAME.jsonl, and of NAME_train.jsonl with worked examples. None: the hub. made: the records instead.
    Raises:
        UserError: a package or a file that lacks, a hub that cannot be reached, a record without a field.
    """
    quiet()
    known = SETS[name]
    path = Path(lm_eval.tasks.__file__).parent / known.file
    try:
        with contextlib.redirect_stdout(None):  # lm-eval says that it has loaded data of nltk, even where it has not
            config = load_yaml(path, resolve_func=known.judge is None)
    except (ImportError, AssertionError) as error:
        raise UserError(
            f"{name} needs a package of the extra evidence ({first_line(error)}); pip install -e '.[evidence]'"
        ) from None
    if known.judge is not None:
        metrics = [{"metric": known.metric, "aggregation": "mean", "higher_is_better": True}]
        config |= {"process_results": known.judge, "metric_list": metrics, "filter_list": None, "unsafe_code": False}
    elif config.get("filter_list"):
        config["filter_list"] = config["filter_list"][-1:]  # of gsm8k's two the one that takes the last number
    if made is not None:
        config["custom_dataset"] = lambda **_: {"test": Dataset.from_list(made())}
    elif folder is not None:
        config |= _local(name, folder, config)
    task: Any = fetched(lambda: ConfigurableTask(config=config))
    _check_counts(name, task)
    return task


def _local(name: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration for a folder's files."""

    def convert(record: Record) -> Record:
        for field in SETS[name].needs:
            if record[field] is None:
                raise ValueError(f"{field} is null")
        return record

    files, train = {config["test_split"]: f"{name}.jsonl"}, f"{name}_train.jsonl"
    without: dict[str, Any] = {}
    if config.get("training_split") and (Path(folder) / train).is_file():
        files[config["training_split"]] = train
    elif config.get("training_split"):
        without = {"training_split": None, "fewshot_split": None, "fewshot_config": None, "num_fewshot": 0}
    read = {split: read_records(folder, file, convert) for split, file in files.items()}
    return without | {"custom_dataset": lambda **_: {split: Dataset.from_list(each) for split, each in read.items()}}


def _check_counts(name: str, task: Any) -> None:
    """Raise UserError where a record is judged by data of nltk that are not here."""
    asked = {each for doc in task.test_docs() for each in doc["instruction_id_list"]} if name == "ifeval" else set()
    if asked & set(COUNTED):
        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            raise UserError(
                "ifeval counts sentences by data of nltk that are not here; run python -m nltk.downloader punkt_tab"
            ) from None


def build_set(name: str, task: Any, limit: int | None, shots: int, lm: Any, tokens: int) -> Questions:
    """Requests of the first ``limit`` records, for answers of at most so many tokens.

    Before a question stand ``shots`` worked examples, or as many as the set gives and all requests fit with. A model
    whose tokenizer has a template for chats is asked by it.
    """
    most, kwargs = task.config.num_fewshot or 0, task.config.generation_kwargs
    tokens = kwargs["max_gen_toks"] = min(tokens, kwargs.get("max_gen_toks", tokens))
    chat = not SETS[name].plain and getattr(lm.tokenizer, "chat_template", None) is not None
    how = {"apply_chat_template": chat, "fewshot_as_multiturn": chat, "chat_template": lm.apply_chat_template}
    for count in range(min(shots, most), -1, -1):
        task.set_config(key="num_fewshot", value=count)
        task.set_fewshot_seed(seed=SEED)  # every model gets the same examples
        task.build_all_requests(limit=limit, rank=0, world_size=1, **how)
        fit = [len(lm.tok_encode(each.args[0])) + tokens <= lm.max_length for each in task.instances]
        if all(fit):
            break
    task.set_config(key="num_fewshot", value=most)
    return Questions(count, {name: task}, sum(fit) / len(fit))


TASK = "A special magic number is hidden within the following text. Memorize it. I will quiz you about it."
ASKED = "What is the special magic number for {} mentioned in the provided text?"
FOUND = "The special magic number for {} mentioned in the provided text is"
HIDDEN = "One of the special magic numbers for {} is: {}."
NOISE = ("Rain fell on the roof.", "The road goes on.", "A clock ticks.", "Somebody closes a door.", "It is late.")
ANSWER = 64  # tokens that an answer has room for


def haystacks(tokenizer: Any, length: int, count: int, seed: int) -> list[Record]:
    """Records of retrieval, each of at most ``length`` tokens with its answer.

    A number stands behind a name among sentences that say nothing. In every second record the others have numbers too.
    """
    draw = random.Random(f"{seed} {length}")

    def hidden() -> tuple[str, str]:
        name = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(4))
        return name, str(draw.randrange(10**6, 10**7))

    def record(noise: bool) -> Record:
        (name, number), n, most = hidden(), length // 4, length - ANSWER
        while True:
            text = [draw.choice(NOISE) if noise else HIDDEN.format(*hidden()) for _ in range(n)]
            text.insert(draw.randrange(n + 1), HIDDEN.format(name, number))
            made = {"input": f"{TASK}\n{' '.join(text)}\n{ASKED.format(name)}", "gen_prefix": FOUND.format(name)}
            tokens = len(tokenizer(f"{made['input']} {made['gen_prefix']}")["input_ids"])
            if tokens <= most or not n:
                return made | {"outputs": [number], "max_length": length}
            n = min(n - 1, n * most // tokens)

    return [record(number % 2 == 0) for number in range(count)]
