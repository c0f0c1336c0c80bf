"""Datasets by name: published formats, local files and folders, the hub."""

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from spec_lab.text import datasets, records
from spec_lab.text.checkers import check
from spec_lab.text.datasets import DATASETS, load

LINES: dict[str, list[dict]] = {
    "spec_bench": [{"question_id": 81, "category": "writing", "turns": ["one", "two"]}],
    "mt_bench": [{"question_id": 7, "category": "roleplay", "turns": ["a", "b"], "reference": ["x", "y"]}],
    "speed_bench": [
        {"question_id": "q1", "category": "coding", "sub_category": "python", "turns": ["one", "two"], "source": "x",
         "src_id": "1", "difficulty": "", "multiturn": True},
        {"question_id": "q2", "category": "rag", "turns": ["three"]},
    ],
    "instruct_coder": [{"instruction": "Rename f to g.", "input": "def f(): pass", "output": "def g(): pass"}],
    "gsm8k": [{"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}],
    "humaneval": [
        {"task_id": "HumanEval/0", "prompt": 'def f(a):\n    """Doc."""\n', "entry_point": "f",
         "canonical_solution": "    return a\n", "test": "def check(f):\n    pass\n"},
    ],
    "livecodebench": [
        {"question_id": "abc", "question_content": "Add two numbers.", "starter_code": "", "difficulty": "easy",
         "private_test_cases": "x"},
        {"question_id": "abd", "question_content": "Add.", "starter_code": "class S:\n    pass", "difficulty": "hard"},
    ],
    "mmlu": [{"question": "Which?", "subject": "logic", "choices": ["this", "that"], "answer": 1}],
}  # fmt: skip


def write(file: Path, lines: list[dict]) -> str:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return str(file)


def read(tmp_path: Path, name: str, **options):
    return load(name, write(tmp_path / f"{name}.jsonl", LINES[name]), **options)


def test_every_dataset_has_an_example_here():
    assert set(LINES) == set(DATASETS)


def test_questions_of_several_turns(tmp_path):
    (prompt,) = read(tmp_path, "spec_bench", template="none", turns=1)
    assert (prompt.name, prompt.text, prompt.workload, prompt.source, prompt.turns) == (
        "81",
        "one",
        "writing",
        "Spec-Bench",
        1,
    )
    assert prompt.template is None
    (prompt,) = read(tmp_path, "mt_bench")
    assert (prompt.name, prompt.text, prompt.later, prompt.source, prompt.checker) == ("7", "a", ("b",), "MT-Bench", "")
    copy = {"prompt_id": 3, "category": "math", "prompt": ["a", "b"], "reference": []}
    (prompt,) = load("mt_bench", write(tmp_path / "copy.jsonl", [copy]))
    assert (prompt.name, prompt.text, prompt.later) == ("3", "a", ("b",))


def test_speed_bench_has_parts_and_categories(tmp_path):
    first, second = read(tmp_path, "speed_bench")
    assert (first.name, first.text, first.later, first.workload) == ("q1", "one", ("two",), "coding")
    lines = [{**line, "turns": None, "messages": [{"role": "user", "content": turn} for turn in line["turns"]]}
             for line in LINES["speed_bench"]]  # fmt: skip
    write(tmp_path / "throughput_8k.jsonl", lines)
    (tmp_path / "qualitative").mkdir()
    pd.DataFrame(LINES["speed_bench"]).to_parquet(tmp_path / "qualitative" / "test.parquet")
    for subset in ("qualitative", "throughput_8k"):
        assert load("speed_bench", str(tmp_path), subset=subset) == [first, second]
    assert load("speed_bench", str(tmp_path), subset="qualitative", category="rag", limit=1) == [second]


def test_a_placeholder_of_speed_bench_is_refused_by_name(tmp_path):
    text = f"{datasets.PLACEHOLDER} USING SPECDEC_BENCH\n\n{{article}}"
    file = write(
        tmp_path / "test.jsonl", [*LINES["speed_bench"], {"question_id": "q3", "category": "qa", "turns": [text]}]
    )
    with pytest.raises(
        ValueError, match=r"test.jsonl:3: question q3 \(category qa\) is a placeholder.*prepare_data.py"
    ):
        load("speed_bench", file)
    assert [prompt.name for prompt in load("speed_bench", file, category="coding")] == ["q1"]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "speed_bench",
            {"subset": "throughput_4k"},
            "subset must be one of qualitative, throughput_1k.*got 'throughput_4k'",
        ),
        ("speed_bench", {"subset": "qualitative"}, "subset=qualitative is a folder below path"),
        ("speed_bench", {"category": "maths"}, "category='maths' is not in .*, which has coding, rag"),
        ("gsm8k", {"subset": "main"}, "subset must be null: gsm8k has no parts"),
        ("gsm8k", {"category": "math"}, "category must be null: questions of gsm8k have none"),
    ],
)
def test_a_part_or_category_that_is_none_is_refused(tmp_path, name, options, why):
    with pytest.raises(ValueError, match=why):
        read(tmp_path, name, **options)


def test_instruct_coder_asks_for_the_edited_code(tmp_path):
    (prompt,) = read(tmp_path, "instruct_coder")
    assert prompt.text.startswith("def f(): pass\n\nRename f to g. Answer with") and "def g" not in prompt.text


def test_gsm8k_asks_for_a_number_and_checks_it(tmp_path):
    (asked,) = read(tmp_path, "gsm8k", checker="number")
    assert asked.name == "gsm8k-1" and "####" in asked.text and (asked.checker, asked.answer) == ("number", "4")
    (completed,) = read(tmp_path, "gsm8k", template="none", checker="number")
    assert completed.text == "Question: 2 and 2?\nAnswer:"
    assert check(asked.checker, "2 + 2 = 4\n#### 4", asked.answer)


def test_humaneval_completes_a_function_or_asks_for_it(tmp_path):
    (prompt,) = read(tmp_path, "humaneval", template="none", checker="python_syntax")
    assert prompt.name == "HumanEval/0" and prompt.text == prompt.answer == LINES["humaneval"][0]["prompt"]
    assert check(prompt.checker, "    return a\n", prompt.answer, completes=True)
    assert not check(prompt.checker, "    return (\n", prompt.answer, completes=True)
    (prompt,) = read(tmp_path, "humaneval", checker="python_syntax")
    assert "```python\ndef f(a):" in prompt.text and "canonical" not in prompt.text


def test_livecodebench_asks_for_a_program_or_completes_one(tmp_path):
    program, method = read(tmp_path, "livecodebench", checker="python_syntax")
    assert "standard input" in program.text and "class S:" in method.text
    assert (program.name, program.workload, method.workload) == ("abc", "easy", "hard")


def test_mmlu_offers_choices(tmp_path):
    (prompt,) = read(tmp_path, "mmlu", checker="choice")
    assert prompt.text.startswith("Which?\nA. this\nB. that\n") and prompt.answer == "B" and prompt.workload == "logic"
    (prompt,) = read(tmp_path, "mmlu", template="none", checker="choice")
    assert prompt.text.endswith("B. that\nAnswer:")


@pytest.mark.parametrize("name", DATASETS)
def test_a_folder_is_searched_for_the_published_names(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=rf"holds no .* of {name}: download it from https"):
        load(name, str(tmp_path))
    for file in DATASETS[name].files:
        folder = tmp_path / f"folder-{file}"
        folder.mkdir()
        if file.endswith(".parquet"):
            pd.DataFrame(LINES[name]).to_parquet(folder / file)
        else:
            write(folder / file, LINES[name])
        assert [prompt.text for prompt in load(name, str(folder))] == [prompt.text for prompt in read(tmp_path, name)]


def test_what_is_not_local_comes_from_the_hub(tmp_path, monkeypatch):
    asked = []

    def download(repository, file, *, repo_type, revision):
        asked.append((repository, file, repo_type, revision))
        return write(tmp_path / "got.jsonl", LINES["gsm8k"])

    monkeypatch.setattr(datasets, "hf_hub_download", download)
    assert len(load("gsm8k", revision="abc")) == 1
    assert asked == [("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset", "abc")]
    with pytest.raises(FileNotFoundError, match=r"spec_bench is not on the hub: download question\.jsonl from .*path"):
        load("spec_bench", revision="abc")
    file = write(tmp_path / "got.jsonl", [*LINES["instruct_coder"], *LINES["speed_bench"]])
    asked.clear()
    monkeypatch.setattr(
        datasets, "hf_hub_download", lambda _, *named, **options: asked.append((*named, options)) or file
    )
    assert len(load("instruct_coder", limit=1)) == 1
    assert len(load("speed_bench", subset="throughput_1k", category="rag")) == 1
    assert [(name, options["revision"]) for name, options in asked] == [
        ("default/train/0000.parquet", "refs/convert/parquet"), ("throughput_1k/test-00000-of-00001.parquet", None),
    ]  # fmt: skip


def test_mt_bench_and_spec_bench_are_bundled():
    chats, questions = load("mt_bench"), load("spec_bench", turns=1)
    assert (
        len(chats) == 80 and {chat.turns for chat in chats} == {2} and {chat.source for chat in chats} == {"MT-Bench"}
    )
    assert [chat.text for chat in chats] == [question.text for question in questions[:80]]
    counts = Counter(question.workload for question in questions)
    assert len(questions) == 480 and {counts[task] for task in ("translation", "summarization", "qa", "rag")} == {80}
    assert [len(load(name, limit=3)) for name in ("mt_bench", "spec_bench")] == [3, 3]
    assert load("spec_bench", limit=17, every=8, turns=1) == questions[:17:8]
    assert load("mt_bench", category="math") == [chat for chat in chats if chat.workload == "math"]
    with pytest.raises(ValueError, match="category='translation' is not in .*, which has coding"):
        load("mt_bench", category="translation")
    digest = hashlib.sha256(datasets.BUNDLED.read_bytes()).hexdigest()
    assert digest in (datasets.BUNDLED.parent / "README.md").read_text()


def test_a_hub_that_cannot_be_reached_says_where_the_file_goes(monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(datasets, "hf_hub_download", unreachable)
    with pytest.raises(OSError, match=r"cannot be fetched from the hub .*no connection.*HumanEval\.jsonl\.gz.*path"):
        load("humaneval")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("spec_bench", {"prompt": "x"}, "'turns' must be a list"),
        ("mt_bench", {"turns": [""]}, r"'turns\[0\]' is empty"),
        ("gsm8k", {"question": "a", "answer": "4"}, "'answer' must end with ####"),
        ("gsm8k", {"text": "a"}, "'question' is missing"),
        ("humaneval", {"task_id": "a"}, "'prompt' is missing"),
        ("livecodebench", {"prompt": "a"}, "'question_content' is missing"),
        ("mmlu", {"question": "a", "choices": ["b"], "answer": 0}, "'choices' must be a list"),
        ("mmlu", {"question": "a", "choices": ["b"] * 27, "answer": 0}, "'choices' must be a list of 2 to 26"),
        ("mt_bench", {"turns": []}, r"'turns' must be a list .*is this the dataset's question\.jsonl"),
        ("mmlu", {"question": "a", "choices": ["b", "c"], "answer": 2}, "'answer' must be the place"),
        ("mmlu", {"question": "a", "choices": ["b", "c"], "answer": "B"}, "'answer' must be the place"),
    ],
)
def test_files_in_another_format_are_refused_with_the_line(tmp_path, name, line, message):
    with pytest.raises(ValueError, match=rf"other\.jsonl:1: .*{message}"):
        load(name, write(tmp_path / "other.jsonl", [line]))


def test_compressed_files_are_bounded_by_what_they_hold(tmp_path, monkeypatch):
    path = write(tmp_path / "HumanEval.jsonl.gz", LINES["humaneval"] * 1)
    assert load("humaneval", path)[0].name == "HumanEval/0"
    monkeypatch.setattr(records, "MAX_FILE", 100)
    with pytest.raises(ValueError, match=r"more than 100 bytes"):
        load("humaneval", write(tmp_path / "bomb.jsonl.gz", [{"prompt": "x" * 1000}]))
    for data in (b"no gzip", gzip.compress(b'{"prompt": "x"}')[:-9]):
        (tmp_path / "bad.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad\.jsonl\.gz:1: gzip cannot read it"):
            load("humaneval", str(tmp_path / "bad.jsonl.gz"))


def test_parquet_files_are_bounded_and_read_as_far_as_needed(tmp_path, monkeypatch):
    file = tmp_path / "test.parquet"
    pd.DataFrame([{"question": f"q {n}?", "answer": f"#### {n}", "more": "x"} for n in range(200)]).to_parquet(file)
    assert [prompt.answer for prompt in load("gsm8k", str(file), limit=70, checker="number")] == [
        str(n) for n in range(70)
    ]
    monkeypatch.setattr(records, "MAX_FILE", 20_000)
    assert len(load("gsm8k", str(file))) == 200
    monkeypatch.setattr(records, "MAX_FILE", 100_000)
    pd.DataFrame([{"question": "q" * 10**6, "answer": "#### 1"}]).to_parquet(file)
    with pytest.raises(ValueError, match="bytes uncompressed, more than"):
        load("gsm8k", str(file))
    monkeypatch.undo()
    whole = file.read_bytes()
    for damaged in (b"no table", whole[:4] + b"x" * 60 + whole[64:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"test\.parquet is no readable Parquet file"):
            load("gsm8k", str(file))


def test_answers_that_the_checker_cannot_compare_are_refused_with_the_line(tmp_path):
    line = {"question": "a", "answer": "#### four"}
    with pytest.raises(ValueError, match=r"other\.jsonl:1: 'answer' must be a number, not 'four'"):
        load("gsm8k", write(tmp_path / "other.jsonl", [line]), checker="number")
    with pytest.raises(ValueError, match=r"checker=exact has nothing to compare with"):
        read(tmp_path, "mt_bench", checker="exact")
