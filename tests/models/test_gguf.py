"""GGUF files as targets and draft models, computed by a fake of llama.cpp."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from spec_lab.core.probabilities import Sampling
from spec_lab.core.process_cache import ProcessCache
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models import gguf
from spec_lab.models.gguf_export import convert
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.runners.llama_context import LlamaSettings
from spec_lab.runners.llama_cpp import LlamaCpp
from spec_lab.runners.llama_recurrent import LlamaRecurrent
from spec_lab.tasks.peers_llama import LlamaGenerate
from tests.checkpoints import checkpoint
from tests.drafters.small_tokenizers import PROSE, byte_level
from tests.gguf_files import with_zoo_tokenizer
from tests.propose.lab import decode, emitted, requests
from tests.runners.fake_llama import FakeLlama, logits_of, numbers
from tests.runners.fake_recurrent import FakeRecurrent, RecurrentMemory

pytest.importorskip("gguf", reason="requires the extra llamacpp")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of a tiny model with the bundled target's tokenizer, and with one that llama.cpp has as well."""
    folder = tmp_path_factory.mktemp("gguf")
    for name, pre in (("own", None), ("gpt2", "gpt-2")):
        convert(with_zoo_tokenizer(folder / name, pre), folder / f"{name}.gguf")
    return folder


def library(**more):
    return FakeLlama(4096, 32, 2, **more)


def load(files, name="own", **options):
    return gguf.load(str(files / f"{name}.gguf"), **{"library": library(), "threads": 1, **options})


def test_a_target_has_the_files_context_tokenizer_ends_and_services(files):
    target = load(files)
    assert isinstance(target.lm, LlamaCpp) and target.vocabulary == target.lm.vocabulary == 4096
    assert target.context == 256 and target.ends == {0} and len(target.sha256) == 64
    assert target.self_check == 0 and target.lm.settings == LlamaSettings(1, "f16", 512, None)
    loaded = AutoTokenizer.from_pretrained(files / "own")
    assert target.tokenizer("def f(x): return 1")["input_ids"] == loaded("def f(x): return 1")["input_ids"]
    assert target.services.hidden_size == 32 and target.services.lm_head(torch.zeros(1, 32)).shape == (1, 4096)
    assert target.lm.facts["engine"] == "llama.cpp" and target.lm.capabilities.hidden_layers == 2
    with pytest.raises(Unsupported, match="LlamaCpp"):
        target.model  # noqa: B018


def test_a_forward_reads_and_computes_what_it_does_in_transformers(files, tmp_path):
    """Weights are the same, the cache is in float32; quantised weights are fewer bytes, and the same products."""
    convert(files / "own", tmp_path / "f32.gguf", "f32")
    convert(files / "own", tmp_path / "q8_0.gguf", "q8_0")
    work = Target.load(str(files / "own"), dtype="float32").lm.work
    assert load(tmp_path, "f32", kv_dtype="f32").lm.work == work
    small = load(tmp_path, "q8_0", kv_dtype="f32").lm.work
    assert small.weight_bytes < work.weight_bytes / 3 and small.row_flops == work.row_flops
    half = load(tmp_path, "f32").lm.work
    assert 2 * half.attention[0].kv_bytes == work.attention[0].kv_bytes


def test_a_target_states_its_own_threads(files):
    lm = load(files, threads=3).lm
    assert lm.threads == 3
    assert Target.load(str(files / "own")).lm.threads is None


def test_of_a_mixture_of_experts_the_experts_of_one_row_are_counted(files):
    file = read_gguf(files / "own.gguf")
    few, many = (
        gguf.work_of(
            replace(
                file,
                metadata={**file.metadata, "llama.expert_count": 8, "llama.expert_used_count": used},
                tensors={
                    name: tensor._replace(shape=(8, *tensor.shape)) if "ffn_up" in name else tensor
                    for name, tensor in file.tensors.items()
                },
            ),
            "f16",
        )
        for used in (2, 8)
    )
    up = sum(tensor.parameters for name, tensor in file.tensors.items() if "ffn_up" in name)
    assert many.row_flops - few.row_flops == 2 * 6 * up and many.weight_bytes > few.weight_bytes
    assert (few.experts.experts, few.experts.per_row, many.experts.per_row) == (8, 2, 8)
    assert many.weight_bytes - few.weight_bytes == pytest.approx(few.experts.beyond_one_row(8), abs=1)


def test_end_tokens_that_llama_cpp_knows_by_their_text_end_a_generation_too(files):
    assert load(files, library=library(ends=(0, 17))).ends == {0, 17}


def test_logits_without_drafts_are_those_of_plain_texts(files):
    target = load(files)
    logits = target.plain_logits([5, 6, 7, 8], 2)
    for row, end in zip(logits, (2, 3, 4), strict=True):
        torch.testing.assert_close(row, torch.from_numpy(logits_of([5, 6, 7, 8][:end], 4096)), rtol=0, atol=0)
    assert not target.lm.sequences


def test_float32_is_exact_for_weights_in_float32_and_others_are_computed_as_they_are(files, tmp_path, caplog):
    target = load(files, dtype="float32")
    assert target.lm.settings.kv_dtype == "f32" and target.lm.context.library.made[-1].flash_attn_type == 0
    convert(files / "own", tmp_path / "bf16.gguf", "bf16")
    assert load(tmp_path, "bf16").lm.settings.kv_dtype == "f16" and not caplog.records
    assert load(tmp_path, "bf16", dtype="float32").lm.settings.kv_dtype == "f16"
    assert "bf16.gguf" in caplog.text and "target.dtype=float32" in caplog.text
    assert load(tmp_path, "bf16", dtype="float32", kv_dtype="f32").lm.settings.kv_dtype == "f32"


def test_a_model_whose_positions_depend_on_the_size_of_the_cache_is_refused(files, monkeypatch):
    read = gguf.read_gguf

    def longrope(path):
        file = read(path)
        file.tensors["rope_factors_long.weight"] = file.tensors["token_embd.weight"]
        return file

    monkeypatch.setattr(gguf, "read_gguf", longrope)
    with pytest.raises(Unsupported, match="longrope"):
        load(files)


class WithTokenizer(FakeLlama):
    """Tokenizes as a tokenizer of transformers does, but for one text."""

    def __init__(self, tokenizer, but=""):
        super().__init__(4096, 32, 2)
        self.tokenizer, self.but = tokenizer, but

    def llama_tokenize(self, vocab, text, size, tokens, room, special, parse):
        ids = self.tokenizer(text.decode(), add_special_tokens=special)["input_ids"]
        if self.but and self.but in text.decode():
            ids = ids[1:]
        for position, token in enumerate(ids):
            tokens[position] = token
        return len(ids)


@pytest.mark.parametrize("but", ["", "Ünïcödé", "<|endoftext|>"])
def test_a_tokenizer_that_splits_otherwise_than_llama_cpp_is_refused(files, but):
    wrapped = WithTokenizer(AutoTokenizer.from_pretrained(files / "gpt2"), but)
    if not but:
        assert load(files, "gpt2", library=wrapped).tokenizer is not None
        return
    with pytest.raises(Unsupported, match=r"gpt2\.gguf.* tokenizer"):
        load(files, "gpt2", library=wrapped)


class SeesSiblings(FakeLlama):
    def attended(self, context, pos, ids):
        return sorted((cell.pos, cell.token) for cell in context.cells if cell.ids and cell.pos <= pos)


class SeesRejected(FakeLlama):
    """Removed tokens stay visible where a cell is used again."""

    def llama_memory_seq_cp(self, memory, source, number, start, end):
        for cell in memory.cells:
            if source in cell.ids and start <= cell.pos < end:
                cell.token += 1
        super().llama_memory_seq_cp(memory, source, number, start, end)


@pytest.mark.parametrize("mutant", [SeesSiblings, SeesRejected])
def test_the_self_check_refuses_a_library_with_a_wrong_attention_mask(files, mutant):
    with pytest.raises(Unsupported, match=r"wrongly in llama\.cpp: .* standard deviations, allowed are 0\.\d+"):
        load(files, library=mutant(4096, 32, 2))


class Noisy(FakeLlama):
    """Weights of few bits: logits vary with the number of rows, and with the rows before in the KV cache."""

    size = 0.3

    def llama_decode(self, context, batch):
        code = super().llama_decode(context, batch)
        logits = context.memory["logits"]
        used = sum(bool(cell.ids) for cell in context.cells)
        logits += self.size * numbers((batch.n_tokens, used), len(logits), "noise")
        return code


class NoisyAndSeesSiblings(Noisy, SeesSiblings):
    pass


def test_a_file_whose_own_rounding_is_large_passes_with_a_warning_and_faults_are_told_apart(files, caplog):
    target = load(files, library=Noisy(4096, 32, 2))
    assert 0.1 < target.self_check < target.tolerance < 1
    (warning,) = [record for record in caplog.records if "cannot be checked closely" in record.getMessage()]
    assert warning.levelname == "WARNING" and "own.gguf" in warning.getMessage()
    with pytest.raises(Unsupported, match=r"wrongly in llama\.cpp: .* allowed are 0\.\d+"):
        load(files, library=NoisyAndSeesSiblings(4096, 32, 2))


def recurrent(**more):
    return FakeRecurrent(4096, 32, 2, **more)


def test_a_model_with_recurrent_layers_is_a_target_for_chains(files):
    target = load(files, library=recurrent())
    assert isinstance(target.lm, LlamaRecurrent) and target.self_check == 0 and target.lm.work is None
    assert target.lm.settings == LlamaSettings(1, "f16", 512, None, 10) and target.lm.capabilities.rollback == 10
    assert target.lm.facts["snapshots"] == 10 and target.lm.capabilities.abilities == frozenset()
    logits = target.plain_logits([5, 6, 7, 8], 2)
    torch.testing.assert_close(logits[-1], torch.from_numpy(logits_of([5, 6, 7, 8], 4096)), rtol=0, atol=0)
    library = recurrent()
    assert load(files, library=library, snapshots=3).lm.capabilities.rollback == 3
    assert {made.n_rs_seq for made in library.made} == {3}


class KeepsNoSnapshots(RecurrentMemory):
    def remove(self, number, start):
        removed = super().remove(number, start)
        self.index[number] = 0
        return removed


def test_the_self_check_refuses_a_library_whose_states_are_not_rolled_back(files, monkeypatch):
    monkeypatch.setattr("tests.runners.fake_recurrent.RecurrentMemory", KeepsNoSnapshots)
    with pytest.raises(Unsupported, match=r"wrongly in llama\.cpp: .* standard deviations"):
        load(files, library=recurrent())


def test_the_self_check_is_measured_once_for_the_same_file_and_setting(files):
    cache, fake = ProcessCache(), library()
    load(files, library=fake, cache=cache)
    made = len(fake.made)
    load(files, library=fake, cache=cache)
    assert len(fake.made) == made
    for more in ({"kv_dtype": "f32"}, {"threads": 2}, {"chunk": 64}, {"gpu_layers": 3}):
        load(files, library=fake, cache=cache, **more)
        assert len(fake.made) > made, more
        made = len(fake.made)


def test_a_draft_model_may_be_a_gguf_file(files, monkeypatch):
    monkeypatch.setattr(gguf, "load_library", library)
    target = load(files, kv_dtype="bf16", chunk=64, gpu_layers=2)
    draft = DraftModel.load(target, str(files / "own.gguf"), depth=2)
    assert isinstance(draft.lm, LlamaCpp) and draft.lm.settings == target.lm.settings
    assert draft.lm.model.gpu_layers == 2
    assert draft.context == 256 and draft.sha256 == target.sha256


def test_llama_cpp_s_own_arms_compute_the_target_s_file_in_a_cache_of_the_size_of_their_requests(files, monkeypatch):
    made = []
    library_ = SimpleNamespace(Llama=lambda path, n_ctx, **more: made.append((path, n_ctx, more["draft_model"])) or 1)
    monkeypatch.setitem(sys.modules, "llama_cpp", library_)
    target, sampling = replace(load(files), name="another"), Sampling()
    arm = LlamaGenerate(target, sampling, 0, lambda size: f"drafts in {size}", 8)
    assert not made, "prompts are not known yet"
    assert arm.llama.for_requests([Request(0, "one", (1, 2), sampling, 20, frozenset())]) == 1
    assert made == [(str(files / "own.gguf"), 256, "drafts in 256")]


def test_a_draft_model_with_another_vocabulary_is_refused(files, monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "load_library", lambda: FakeLlama(128, 32, 2))
    convert(checkpoint(tmp_path / "other", vocab_size=128), tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="another tokenizer than the target"):
        DraftModel.load(load(files), str(tmp_path / "other.gguf"), depth=2)


def test_a_gguf_draft_with_another_vocabulary_drafts_shared_tokens(files, monkeypatch, tmp_path):
    tokenizer = byte_level(PROSE, 60)
    split = pre_tokenizers.Punctuation(), tokenizer.backend_tokenizer.pre_tokenizer  # none that llama.cpp has
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split])
    tokenizer.save_pretrained(checkpoint(tmp_path / "other", vocab_size=len(tokenizer)))
    convert(tmp_path / "other", tmp_path / "other.gguf")
    monkeypatch.setattr(gguf, "load_library", lambda: FakeLlama(len(tokenizer), 32, 2))
    target, plain = load(files), load(files)
    draft = DraftModel.load(target, str(tmp_path / "other.gguf"), depth=3, vocabularies="intersect")
    assert isinstance(draft.lm, LlamaCpp) and 255 < draft.facts["shared_tokens"] < len(tokenizer)
    asked = requests(new=12, prompts=[target.tokenizer("def f(x):")["input_ids"]])
    group, steps = decode(target, draft, asked)
    assert emitted(group) == emitted(decode(plain, Null(), asked)[0])
    assert sum(info.draft.shape.nodes for info in steps) > 5
