"""Datasets by name: from the files as their authors publish them, in a local folder or from the hub, to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Unpack

from huggingface_hub import hf_hub_download

from spec_lab.core.options import Count, Filled, OneOf, WrongOption, brief
from spec_lab.core.options import checked as check_arguments
from spec_lab.models.checkpoint import one_line
from spec_lab.text.conversations import ChatOptions, chat_options, turns_of
from spec_lab.text.prompts import Prompt
from spec_lab.text.records import records, text_of, word


class Question(NamedTuple):
    """The question that a record of a dataset asks."""

    name: str
    """Its id; empty for a record without one."""
    turns: list[str]
    """The user's messages."""
    workload: str
    answer: str | None = None
    """For the checker; None: there is none."""


@dataclass(frozen=True)
class Dataset:
    """Where a dataset is, and how it is read.

    Args:
        source: its name, as rows record it.
        files: names that its file may have in a local folder.
        page: where its file can be downloaded.
        read: returns a record's question; its arguments are the file and line, the record, and whether the model
            completes a text (``prompts.template=none``) or answers a message.
        hub: repository and file on the hub, "{subset}" in place of a subset; None where the hub does not have it.
        bundled: number of its questions in ``BUNDLED``, from the first; 0: it is not bundled.
        columns: of a Parquet file, those that are read.
        revision: where the file is on the hub; None: the dataset's own, main for most.
        category: the field by which its questions are chosen (``category``); empty: there is none.
        subsets: its folders, each a set of questions of its own; the first is the default of the hub.
    """

    source: str
    files: tuple[str, ...]
    page: str
    read: Callable[[str, Mapping[str, Any], bool], Question]
    hub: tuple[str, str] | None = None
    columns: tuple[str, ...] | None = None
    bundled: int = 0
    revision: str | None = None
    category: str = ""
    subsets: tuple[str, ...] = ()


BUNDLED = Path(__file__).parents[1] / "zoo" / "questions" / "spec_bench.jsonl"
"""Spec-Bench's questions, the first of which are MT-Bench's; ``README.md`` beside it names source and licence."""


@check_arguments
def load(
    name: Annotated[str, OneOf(DATASETS)],
    path: str | None = None,
    revision: str | None = None,
    limit: Count | None = None,
    every: Count = 1,
    subset: Filled | None = None,
    category: Filled | None = None,
    **chat: Unpack[ChatOptions],
) -> list[Prompt]:
    """Read a dataset.

    Args:
        name: the dataset, which tells how its file is read.
        path: the file, or its folder; None: the bundled file, if there is one and no revision, else from the hub.
        revision: branch, tag or commit on the hub; None: the dataset's own, main for most.
        limit: number of questions, from the first; None: all.
        every: 8: only each eighth of these, from the first; 1: all.
        subset: a part of a dataset that has several, such as throughput_8k of SPEED-Bench; None: the file at ``path``,
            on the hub the first part.
        category: only questions of this category (of MMLU the subject); None: all.
        chat: see ``ChatOptions``.

    Raises:
        OSError: there is no such file, or the hub cannot be reached.
        ValueError: an unknown dataset, an invalid option, a file in another format.
    """
    dataset = DATASETS[name]
    how = chat_options(**chat)
    if revision is not None and (not isinstance(revision, str) or not revision or path is not None):
        raise WrongOption(f"revision must name a branch, tag or commit, without path (got {brief(revision)})")
    _check_parts(name, dataset, path, subset, category)
    if path is None and revision is None and dataset.bundled:
        file, questions = str(BUNDLED), dataset.bundled
    else:
        questions = None
        file = _fetched(name, dataset, revision, subset) if path is None else _local(name, dataset, path, subset)
    prompts = {}
    chosen = islice(records(file, limit if category is None else None, columns=dataset.columns), questions)
    if category is not None:
        chosen = islice(_of_category(chosen, dataset.category, category, file), limit)
    for where, line, record in islice(chosen, 0, None, every):
        given, asked, workload, answer = dataset.read(where, record, chat.get("template") == "none")
        named = given or f"{Path(file).name.partition('.')[0]}-{line}"
        prompts[line] = how.prompt(named, asked, workload, dataset.source, answer, where=where)
    return how.all_of(prompts, file)


def _check_parts(name: str, dataset: Dataset, path: str | None, subset: str | None, category: str | None) -> None:
    """Refuse a subset or a category that a dataset does not have."""
    if subset is not None and subset not in dataset.subsets:
        known = f"one of {', '.join(dataset.subsets)}" if dataset.subsets else f"null: {name} has no parts"
        raise WrongOption(f"subset must be {known} (got {brief(subset)})")
    if subset is not None and path is not None and Path(path).is_file():
        raise WrongOption(f"subset={subset} is a folder below path, but {path} is a file: leave one of them out")
    if category is not None and not dataset.category:
        raise WrongOption(f"category must be null: questions of {name} have none (got {brief(category)})")


def _of_category(
    all_records: Iterable[tuple[str, int, dict[str, Any]]], field: str, category: str, file: str
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the records of a category."""
    seen: dict[str, None] = {}
    for where, line, record in all_records:
        given = word(record, field, where)
        seen[given] = None
        if given == category:
            yield where, line, record
    if category not in seen:
        raise WrongOption(
            f"category={brief(category)} is not in {file}, which has {', '.join(sorted(seen))[:500] or 'no questions'}"
        )


def _local(name: str, dataset: Dataset, path: Any, subset: str | None) -> str:
    """Return the file at ``path``, or that of the dataset in the folder, in the subset's folder where one is named."""
    if not isinstance(path, str) or not path:
        raise WrongOption(f"path must name a file or a folder, or be null for the hub, not {brief(path)}")
    if not Path(path).is_dir():
        return path
    files = dataset.files if subset is None else [f"{subset}/{file}" for file in dataset.files] + [f"{subset}.jsonl"]
    for file in files:
        if (Path(path) / file).exists():
            return str(Path(path) / file)
    raise FileNotFoundError(
        f"the folder {path} holds no {' or '.join(files)} of {name}: download it from {dataset.page}"
    )


def _fetched(name: str, dataset: Dataset, revision: str | None, subset: str | None) -> str:
    """Return the dataset's file in the hub's cache, after downloading it."""
    if dataset.hub is None:
        raise FileNotFoundError(
            f"{name} is not on the hub: download {dataset.files[0]} from {dataset.page}, and set prompts.path to it"
        )
    repository, file = dataset.hub
    file = file.format(subset=subset or next(iter(dataset.subsets), ""))
    try:
        return hf_hub_download(repository, file, repo_type="dataset", revision=revision or dataset.revision)
    except Exception as error:  # also those of the HTTP library
        raise OSError(
            f"{file} of the dataset {repository} cannot be fetched from the hub ({one_line(error)}): try again when "
            f"the hub can be reached, or download {dataset.files[0]} from {dataset.page} and set prompts.path to it"
        ) from error


def _turns(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a question of MT-Bench or Spec-Bench: ``question_id``, ``category``, ``turns``; ``prompt_id`` and
    ``prompt`` in MT-Bench's copy on the hub.
    """
    key = "prompt" if isinstance(record.get("prompt"), list) else "turns"
    if not isinstance(record.get(key), list) or not record[key]:
        raise ValueError(
            f"{where}: 'turns' must be a list with at least one turn; is this the dataset's question.jsonl?"
        )
    name = word(record, "question_id", where) or word(record, "prompt_id", where)
    return Question(name, turns_of(record, key, where), word(record, "category", where))


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a question of SPEED-Bench begins that its authors do not redistribute."""


def _speed_bench(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a question of SPEED-Bench: ``question_id``, ``category``, and ``turns`` or ``messages`` of the user."""
    sent = record.get("messages")
    if record.get("turns") is None and isinstance(sent, list):
        record = {**record, "turns": [message.get("content") if isinstance(message, Mapping) else message
                                      for message in sent]}  # fmt: skip
    question = _turns(where, record, completes)
    if any(turn.startswith(PLACEHOLDER) for turn in question.turns):
        raise ValueError(
            f"{where}: question {question.name} (category {question.workload}) is a placeholder, which SPEED-Bench "
            "does not redistribute: fill it with prepare_data.py of specdec_bench "
            "(https://github.com/NVIDIA/Model-Optimizer) and set prompts.path to the folder that it writes, or set "
            "prompts.category to one without placeholders"
        )
    return question


def _instruct_coder(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return an edit of InstructCoder: ``instruction`` and ``input``, the code; ``output`` is not read."""
    code, instruction = text_of(record, "input", where), text_of(record, "instruction", where)
    asked = f"{code}\n\n{instruction} Answer with the whole edited code in one code block, without an explanation."
    return Question("", [asked], "code editing")


def _gsm8k(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a question of GSM8K: ``question``, and ``answer`` that ends with "#### " and a number."""
    question = text_of(record, "question", where)
    _, mark, answer = text_of(record, "answer", where).rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(f"{where}: 'answer' must end with #### and a number; is this GSM8K's file?")
    asked = (
        f"Question: {question}\nAnswer:"
        if completes
        else f"{question}\n\nThink step by step. End with a line that holds #### and the answer, which is a number."
    )
    return Question("", [asked], "math", answer.strip())


def _humaneval(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a problem of HumanEval: ``task_id`` and ``prompt``, the beginning of a function; tests are not read."""
    begun = text_of(record, "prompt", where)
    asked = (
        begun
        if completes
        else "Complete this Python function. Answer with the whole function, imports included, in one Python code "
        f"block.\n\n```python\n{begun.rstrip()}\n```"
    )
    return Question(word(record, "task_id", where), [asked], "code", begun)


def _livecodebench(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a problem of LiveCodeBench: ``question_id``, ``question_content``, ``starter_code``, ``difficulty``. Its
    tests are not read.
    """
    problem, starter = text_of(record, "question_content", where), word(record, "starter_code", where)
    how = (
        f"Complete this program, and answer with all of it in one Python code block.\n\n```python\n{starter}\n```"
        if starter.strip()
        else "Read the input from standard input, and write the output to standard output. Answer with the whole "
        "program in one Python code block."
    )
    return Question(word(record, "question_id", where), [f"{problem}\n\n{how}"], word(record, "difficulty", where), "")


def _mmlu(where: str, record: Mapping[str, Any], completes: bool) -> Question:
    """Return a question of MMLU: ``question``, ``subject``, ``choices`` and ``answer``, the number of a choice."""
    question, choices, correct = text_of(record, "question", where), record.get("choices"), record.get("answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26 or {type(choice) for choice in choices} != {str}:
        raise ValueError(f"{where}: 'choices' must be a list of 2 to 26 texts")
    if isinstance(correct, bool) or not isinstance(correct, int) or not 0 <= correct < len(choices):
        raise ValueError(f"{where}: 'answer' must be the place of the correct choice, from 0, not {brief(correct)}")
    letters = [chr(ord("A") + number) for number in range(len(choices))]
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    last = "Answer:" if completes else "\nEnd with a line 'Answer: X', in which X is the letter of the correct choice."
    return Question("", ["\n".join([question, *lines, last])], word(record, "subject", where), letters[correct])


DATASETS: Mapping[str, Dataset] = {
    "spec_bench": Dataset(
        "Spec-Bench",
        ("question.jsonl", "spec_bench_question.jsonl"),
        "https://github.com/hemingkx/Spec-Bench (data/spec_bench)",
        _turns,
        bundled=480,
        category="category",
    ),
    "mt_bench": Dataset(
        "MT-Bench",
        ("question.jsonl", "mt_bench.jsonl"),
        "https://github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench)",
        _turns,
        ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
        bundled=80,
        category="category",
    ),
    "speed_bench": Dataset(
        "SPEED-Bench",
        ("test.parquet", "test-00000-of-00001.parquet", "test.jsonl"),
        "https://huggingface.co/datasets/nvidia/SPEED-Bench",
        _speed_bench,
        ("nvidia/SPEED-Bench", "{subset}/test-00000-of-00001.parquet"),
        ("question_id", "category", "turns", "messages"),
        category="category",
        subsets=("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32))),
    ),
    "instruct_coder": Dataset(
        "InstructCoder",
        ("0000.parquet", "train.jsonl", "valid.jsonl"),
        "https://huggingface.co/datasets/likaixin/InstructCoder",
        _instruct_coder,
        ("likaixin/InstructCoder", "default/train/0000.parquet"),
        ("instruction", "input"),
        revision="refs/convert/parquet",  # the hub's own Parquet copy of train.json
    ),
    "gsm8k": Dataset(
        "GSM8K",
        ("test.jsonl", "gsm8k.jsonl", "test-00000-of-00001.parquet"),
        "https://github.com/openai/grade-school-math (grade_school_math/data)",
        _gsm8k,
        ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        ("question", "answer"),
    ),
    "humaneval": Dataset(
        "HumanEval",
        ("HumanEval.jsonl.gz", "HumanEval.jsonl", "test-00000-of-00001.parquet"),
        "https://github.com/openai/human-eval (data)",
        _humaneval,
        ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
        ("task_id", "prompt"),
    ),
    "livecodebench": Dataset(
        "LiveCodeBench",
        ("test6.jsonl", "test5.jsonl", "test4.jsonl", "test3.jsonl", "test2.jsonl", "test.jsonl"),
        "https://huggingface.co/datasets/livecodebench/code_generation_lite",
        _livecodebench,
        ("livecodebench/code_generation_lite", "test6.jsonl"),
        category="difficulty",
    ),
    "mmlu": Dataset(
        "MMLU",
        ("test.jsonl", "mmlu.jsonl", "test-00000-of-00001.parquet"),
        "https://huggingface.co/datasets/cais/mmlu",
        _mmlu,
        ("cais/mmlu", "all/test-00000-of-00001.parquet"),
        ("question", "subject", "choices", "answer"),
        category="subject",
    ),
}
"""By the name that ``prompts.name`` gives. Published: MT-Bench (2306.05685), Spec-Bench (2401.07851), GSM8K
(2110.14168), HumanEval (2107.03374), LiveCodeBench (2403.07974), MMLU (2009.03300), SPEED-Bench (2604.09557),
InstructCoder (2310.20329).
"""
