"""Writes small task files of our own, in the form that the sets were published in, for tests of downstream tasks."""

import json
from pathlib import Path

PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gil", "Hana")


def records() -> dict[str, list[dict]]:
    """By file of configs/tasks, eight records each."""
    numbered = list(enumerate(PEOPLE))
    return {
        "tasks/cb_val.jsonl": [
            {"premise": f"{who} said that it rained.", "hypothesis": f"{who} was wet", "label": label, "idx": i}
            for i, who in numbered
            for label in [("entailment", "contradiction", "neutral")[i % 3]]
        ],
        "tasks/rte_val.jsonl": [
            {"premise": f"{who} keeps {i} bees.", "hypothesis": f"{who} keeps bees.", "label": label, "idx": i}
            for i, who in numbered
            for label in [("entailment", "not_entailment")[i % 2]]
        ],
        "tasks/copa_superglue_val.jsonl": [copa(i, who, ("cause", "effect")[i % 2]) for i, who in numbered[:3]],
        "tasks/copa_dev_original500.jsonl": [copa(i, who, ("cause", "effect")[i % 2]) for i, who in numbered],
        "tasks/lambada_openai_test.jsonl": [
            {"text": f"The model reads what {who} wrote, and the layer keeps only the rows of {who}"}
            for _, who in numbered
        ],
        "tasks/openbookqa_test.jsonl": [
            {
                "id": str(i),
                "question": {
                    "stem": f"{who} sees the moon because",
                    "choices": [{"text": f"of reason {n} {who}", "label": "ABCD"[n]} for n in range(4)],
                },
                "answerKey": "ABCD"[i % 4],
            }
            for i, who in numbered
        ],
        "tasks/piqa_valid.jsonl": [
            {"goal": f"Help {who}", "sol1": f"Ask {who} first.", "sol2": f"Run from {who}.", "label": i % 2}
            for i, who in numbered
        ],
        "tasks/winogrande_valid.jsonl": [
            {"sentence": f"{who} saw Max so _ smiled first.", "option1": who, "option2": "Max", "answer": "12"[i % 2]}
            for i, who in numbered
        ],
        "tasks/hellaswag_val_subset.jsonl": [
            {
                "ind": i,
                "ctx": f"Walking: {who} takes the dog out. the dog",
                "label": i % 4,
                "endings": [f"runs to {who}.", "sleeps [step] a while.", "barks at trees.", "eats the rope."],
            }
            for i, who in numbered
        ],
        "general_heldout.jsonl": [
            {"id": who, "text": f"{who} reads a token , and memory traffic falls ."} for who in PEOPLE
        ],
        "c4/c4-validation.jsonl": [{"text": f"The row of {who} matters .", "url": "none"} for who in PEOPLE],
    }


def copa(i: int, who: str, question: str) -> dict:
    return {
        "premise": f"{who} closed the door.",
        "choice1": f"The wind was strong for {who}.",
        "choice2": "It was open.",
        "question": question,
        "label": i % 2,
        "idx": i,
    }


def write_task_files(folder: Path) -> Path:
    """All files that configs/tasks names, under ``folder``."""
    for name, lines in records().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "wikitext2").mkdir(exist_ok=True)
    pages = [
        f" \n = {who} = \n \n {who} reads 1 @,@ 000 tokens . \n \n = = Life = = \n \n It was short . \n"
        for who in PEOPLE
    ]
    (folder / "wikitext2" / "valid.raw.txt").write_text("".join(pages))
    return folder
