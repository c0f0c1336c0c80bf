"""One target on several devices, or split over two ranks of torchrun, emits the same tokens as on one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import chain, forest
from spec_lab.drafters.medusa.network import Heads
from spec_lab.models import loading
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.self_check import self_check
from spec_lab.models.target import Target
from spec_lab.models.tensor_parallel import Link
from spec_lab.results.manifest import claim, manifest
from spec_lab.runners.causal_lm import CausalLM
from tests.checkpoints import checkpoint, prompts
from tests.models import families
from tests.models.families import tiny_family
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
WINDOWS = {"gemma2": 1e-5, "mimo_v2_flash": 1e-4, "llama4_text": 1e-4}
"""Families with layers of other kinds than full attention, and how far logits of two ranks may be from those of one."""
LIMIT = 120  # seconds: a limit for hanging commands
EVERYWHERE = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Tiny targets of four families in float64, a draft, and prompts."""
    folder = tmp_path_factory.mktemp("parallel")
    for family in ("llama", "qwen3", "gpt2"):
        checkpoint(folder / family, torch.float64, family=family)
    for family in WINDOWS:
        shutil.copytree(
            folder / "llama", folder / family, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        tiny_family(family).save_pretrained(folder / family)
    families.tiny_family("deepseek_v2-dense", q_lora_rank=None).save_pretrained(checkpoint(folder / "latent"))
    checkpoint(folder / "draft", torch.float64, seed=1, num_hidden_layers=1)
    shutil.copytree(folder / "llama", folder / "unseen")
    prompts(folder / "prompts.jsonl")
    return folder


def torchrun(*command: str, cwd: Path) -> subprocess.Popen:
    """Start two ranks of a command, with all output in one pipe."""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = alone | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*start, *command], cwd=cwd, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Its exit code and output; hanging fails the test."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks, which have sessions of their own
        pytest.fail(f"hangs: {process.communicate()[0]}")
    return process.returncode, output


def run_of(here: Path, *more: str) -> list[str]:
    """The options of a short run in float64."""
    given = [f"target.path={here / 'llama'}", "target.dtype=float64", "prompts=jsonl", "warmup=0"]
    return [*given, f"prompts.path={here / 'prompts.jsonl'}", "batch_size=2", "max_new_tokens=12", *more]


def texts(out: Path) -> pd.DataFrame:
    """The emitted texts by arm and request."""
    rows = pd.read_parquet(out / "requests.parquet", columns=["arm", "request", "tokens", "finish"])
    rows["tokens"] = rows["tokens"].map(list)
    return rows.sort_values(["arm", "request"]).reset_index(drop=True)


def by_family(sweep: Path) -> dict[str, tuple[Path, dict]]:
    """Each run's folder and manifest, by the name of its target's folder."""
    begun = {file.parent: json.loads(file.read_text()) for file in sweep.glob("*/manifest.json")}
    return {Path(facts["config"]["target"]["path"]).name: (folder, facts) for folder, facts in begun.items()}


# Two ranks ---------------------------------------------------------------------------------------------------------

needs_gloo = pytest.mark.skipif(torch.version.cuda is not None, reason="two ranks are compared on a CPU build of torch")


@pytest.fixture(scope="module")
def answers(here):
    """The findings of the first of two ranks (``two_ranks``), and the exit code and output of the command."""
    if torch.version.cuda is not None:
        pytest.skip("TWO RANKS ARE NOT TESTED: they are compared on a CPU build of torch, and this one is for CUDA")
    code, output = ended(torchrun(str(ROOT / "tests" / "two_ranks.py"), str(here), cwd=ROOT))
    assert (here / "answers.json").is_file(), output
    held = json.loads((here / "held.json").read_text())
    return json.loads((here / "answers.json").read_text()) | {"code": code, "output": output, "held": held}


@pytest.mark.nightly  # two processes that import torch
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_ranks_share_a_model_and_return_its_logits(answers, here, family):
    answer = answers[family]
    assert answer["error"] < 1e-10 and answer["self_check"] < 1e-10
    assert answer["kv_heads"] == [1, 2] and answer["share_of_a_matrix"] == 0.5
    assert answer["sha256"] == weights_hash(str(here / family)) and answer["vocabulary"] == 61


@pytest.mark.nightly
def test_two_ranks_share_the_heads_of_latent_attention_and_each_has_all_latents(answers):
    answer = answers["latent"]
    assert answer["error"] < 1e-5 and answer["self_check"] < 1e-6  # its rotations are in float32
    assert answer["kv_heads"] == [1, 1] and answer["share_of_a_matrix"] == 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("family", WINDOWS)
def test_two_ranks_share_layers_with_windows_chunks_soft_caps_and_sinks(answers, family):
    answer = answers[family]
    assert answer["error"] < WINDOWS[family] and answer["self_check"] < WINDOWS[family]
    assert answer["kv_heads"] == [1, 2] and answer["share_of_a_matrix"] == 0.5


@pytest.mark.nightly
def test_a_call_that_fails_on_every_rank_is_an_error_like_any_other(answers):
    assert "invalid data type" in answers["together"]


@pytest.mark.nightly
def test_a_rank_frees_the_models_and_cells_that_the_first_one_has_dropped(answers):
    assert len(answers["held"]) > 4 and all(answer == {"layers": 0, "things": 0} for answer in answers["held"])


@pytest.mark.nightly
def test_a_rank_that_fails_alone_ends_all_with_its_error(answers, here):
    assert answers["code"] == 1 and not (here / "went_on").exists()
    assert "spec_lab: rank 1, and not every rank, failed: there is nothing on this machine" in answers["output"]


@pytest.mark.nightly
@needs_gloo
def test_two_ranks_emit_the_tokens_of_one_with_a_tree_and_without(here, cli, tmp_path):
    tree = ["proposer=draft_tree", f"proposer.path={here / 'draft'}", "sampling.temperature=1"]
    both = [f"target.path={here / 'llama'},{here / 'qwen3'}", *run_of(here, *tree)[1:]]
    code, output = ended(
        torchrun("-m", "spec_lab", "--multirun", *both, "target.tensor_parallel=true", "output_dir=two", cwd=tmp_path)
    )
    assert code == 0, output
    assert [output.count(once) for once in ("1 of 2, ", "2 of 2, ", "two: 2 done")] == [1, 1, 1], output
    alone, _, errors = cli("--multirun", *both, "output_dir=one")
    assert alone == 0, errors
    ones, twos = by_family(tmp_path / "one"), by_family(tmp_path / "two")
    assert ones.keys() == twos.keys() == {"llama", "qwen3"}
    for family, (out, begun) in ones.items():
        two, begun_by_two = twos[family]
        assert set(texts(out)["arm"]) == {"draft_tree", "baseline"}
        pd.testing.assert_frame_equal(texts(out), texts(two))
        assert (begun["ranks"], begun_by_two["ranks"]) == (1, 2)
        assert begun["weights_sha256"] == begun_by_two["weights_sha256"]


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_if(monkeypatch):
    """Pretend to be a rank of torchrun without GPUs, for refusals that come before the ranks meet."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)

    def pretend(rank: int, size: int) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
            monkeypatch.setenv(name, str(value))

    return pretend


def test_ranks_that_share_no_model_are_refused(here, as_if, cli, tmp_path):
    as_if(0, 2)
    code, _, errors = cli(*run_of(here, "output_dir=none", "target.dtype=float32"))
    assert code == 1 and "they share no model: give target.tensor_parallel=true" in errors
    assert not (tmp_path / "none").exists()


def test_peers_are_refused_on_several_ranks_before_anything_is_loaded(as_if, cli):
    as_if(0, 2)
    code, _, errors = cli("+experiment=peers", "target.path=absent", "target.tensor_parallel=true", "output_dir=none")
    assert code == 1 and "peers run in one process: leave them out" in errors


def test_a_rank_that_reads_other_weights_than_the_first_one_is_refused(here, as_if):
    as_if(1, 2)
    with pytest.raises(OSError, match="weights .*rank 0"):
        loading._read_weights(str(here / "llama"), "float64", sha256=weights_hash(str(here / "qwen3")))
    assert loading._read_weights(str(here / "llama"), "float64", sha256=weights_hash(str(here / "llama")))


def test_after_an_interrupted_call_ranks_are_called_no_more(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    link = Link()
    with pytest.raises(KeyboardInterrupt), link._step():
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="interrupted"), link._step():
        pytest.fail("it went on")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tensor_parallel": "yes"}, "tensor_parallel .*'yes'"),
        ({"tensor_parallel": True}, "target.tensor_parallel .*torchrun"),
        ({"tensor_parallel": True, "attention": "dense_mask"}, "target.attention=dense_mask"),
        (
            {"tensor_parallel": True, "device_map": "auto"},
            "target.device_map and target.tensor_parallel ",
        ),
        ({"tensor_parallel": True, "device": "cpu"}, "target.device and target.tensor_parallel "),
        ({"device_map": "auto", "device": "cpu"}, "target.device and target.device_map "),
        ({"device_map": "sequential"}, "auto, balanced .*'sequential'"),
        ({"device_map": {}}, "auto, balanced .*{}"),
        ({"device_map": {"": "disk"}}, "disk"),
        ({"device_map": {"": "cpu", "lm_head": "meta"}}, "lm_head .*meta"),
        ({"device_map": {"lm_head": "gpu"}}, "target.device_map, lm_head: .*'gpu'"),
        ({"device_map": {"": None}}, "device_map.*null"),
        ({"device_map": {"": 64}}, "device 64 "),
        (
            {"device_map": {"": "cpu", "head": "cpu"}},
            "'head'.* model, lm_head,",
        ),
        ({"device_map": {"model": "cpu"}}, "no device for lm_head"),
        ({"device_map": dict.fromkeys(EVERYWHERE[:3] + EVERYWHERE[4:], "cpu")}, "no device for model.rotary_emb"),
    ],
)
@pytest.mark.one_in(27)
def test_impossible_placements_are_named(here, more, says):
    with pytest.raises(ValueError, match=says):
        Target.load(str(here / "llama"), dtype="float64", **more)


def test_only_the_first_rank_loads_a_target(here, as_if):
    as_if(1, 2)
    with pytest.raises(ValueError, match="rank 1 "):
        Target.load(str(here / "llama"), tensor_parallel=True)


def test_one_rank_has_the_whole_model(here, as_if):
    as_if(0, 1)
    target = Target.load(str(here / "llama"), dtype="float64", tensor_parallel=True)
    assert isinstance(target.lm.model.lm_head.weight, torch.nn.Parameter) and target.self_check < 1e-10


def test_a_run_on_one_rank_is_not_resumed_on_two(as_if, tmp_path):
    given = ({}, 0, {}, "", ["baseline"], {})
    claim(tmp_path, manifest(*given))
    as_if(0, 2)
    with pytest.raises(ValueError, match="ranks: 1 there, 2 here"):
        claim(tmp_path, manifest(*given))


# Several devices ---------------------------------------------------------------------------------------------------


EACH = "{" + ",".join(f"{rank}:cpu" for rank in EVERYWHERE) + "}"


@pytest.mark.nightly
@pytest.mark.parametrize("places", ["auto", pytest.param(EACH, marks=pytest.mark.nightly)])
def test_a_device_map_changes_no_token(here, cli, tmp_path, places):
    tree = ["proposer=draft_tree", f"proposer.path={here / 'draft'}", "sampling.temperature=1"]
    assert cli(*run_of(here, *tree, "output_dir=plain"))[0] == 0
    code, _, errors = cli(*run_of(here, *tree, "output_dir=mapped", f"target.device_map={places}"))
    assert code == 0, errors
    pd.testing.assert_frame_equal(texts(tmp_path / "plain"), texts(tmp_path / "mapped"))


def test_the_self_check_passes_with_the_hooks_of_a_device_map():
    model = tiny_model()
    dispatch_model(model, dict.fromkeys(EVERYWHERE, "cpu"), main_device="cpu", force_hooks=True)
    assert hasattr(model.model.layers, "_hf_hook")
    assert self_check(model, "per_sequence").error < 1e-10 and self_check(model, "dense_mask").error < 1e-10


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
def test_each_layers_cells_and_masks_are_where_the_layer_is(attention):
    """With fake tensors, which hold no numbers: among them, too, an operation over two devices is an error."""
    model, draft = tiny_model(), Draft(forest((chain(3),) * 2), torch.arange(6))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in (model, model.model.layers[1], model.model.norm, model.lm_head):
            device = "cpu" if part is model else "meta"
            for module in part.modules():
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device=device)))
            add_hook_to_module(part, AlignDevicesHook(execution_device=device, io_same_device=part is model))
        lm = CausalLM(model, attention)
        lm.capture((-1,))
        paths = [lm.open() for _ in range(2)]
        outputs = [lm.forward(paths, [[1, 2], [3]], drafted) for drafted in (empty(2), draft, draft)]  # holes from 2 on
        states = torch.stack([hidden[-1] for hidden in outputs[-1].pending])
        drafts = Heads.random(Target(lm, None, "", 8, "", 0.0), 2, trunk=True)(states, torch.tensor([1, 2]))
    assert {tensor.device.type for tensor in (*(output.logits for output in outputs), states, drafts)} == {"cpu"}
    for layer, device in zip(lm.cells.views, ("cpu", "meta"), strict=True):
        assert {span.device.type for store in layer for span in store} == {device}
