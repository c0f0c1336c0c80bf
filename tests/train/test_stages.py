"""A miniature model goes through all training stages: seconds, one thread, one small package."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.zoo import acceptance, distill, pretrain, stages
from scripts.zoo.generate import Generation
from scripts.zoo.settings import Settings
from spec_lab.core.files import file_hash
from spec_lab.drafters.draft_model.train import DraftRecipe
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.eagle.train import Eagle3Recipe
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.hydra.train import HydraRecipe
from spec_lab.drafters.medusa.network import Heads, Trunk
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy
from spec_lab.train.fit import FitPlan
from spec_lab.train.objectives import Measured
from spec_lab.train.recipe import TargetHead
from spec_lab.train.trainer import Plan, Trainer, schedule

SHAPE = pretrain.Shape(hidden=32, layers=2, heads=2, intermediate=64, vocab=512, positions=256)
PLAN = Plan(batch=2, grown_batch=3, part=1, length=32, warmup=2)
STILL = replace(PLAN, muon_rate=0.0, adamw_rate=0.0)
LEARNING = FitPlan(1.0, rows=2, part=2, warmup=1, plan=PLAN)


def eagle3(unrolls):
    return Eagle3Recipe(unrolls, draft_vocab_size=64, taps=(0, 1, 1), from_target=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a miniature after the corpus and prompts stages."""
    root = tmp_path_factory.mktemp("train")
    made = Settings(
        work=root / "work",
        zoo=root / "zoo",
        packages={"omegaconf": 300_000},
        records=60,
        hold_out={"omegaconf": 2},
        candidates={"code": 3, "json": 3, "prose": 3},
        prompts={"code": 2, "json": 2, "prose": 2},
        vocab=512,
        target=SHAPE,
        draft=replace(SHAPE, layers=1),
        plan=PLAN,
        draft_plan=replace(PLAN, grown_batch=2, seed=1),
        control=pretrain.Control(4, 8, 4),
        draft_control=pretrain.Control(0, 4, 2),
        generation=Generation(batch=4, length=24, prefixes=(8, 12)),
        distillation=distill.Distillation(
            4, layers=2, width=48, rows=2, part=1, warmup=2, plain_steps=4, passes=3, plan=replace(PLAN, muon_rate=1e-2)
        ),
        taps=(0, 1, 1),
        eagle3=[
            (eagle3(1), FitPlan(0.5, rows=2, part=1, warmup=1, plan=PLAN)),
            (eagle3(2), replace(LEARNING, plan=STILL)),
        ],
        hydra=[(HydraRecipe(heads=2, identity_skip=True), LEARNING)],
        drafters={
            "eagle3": eagle3(1),
            "hydra": HydraRecipe(heads=2),
            "draft": DraftRecipe(hidden_size=16, layers=1, heads=2),
        },
        drafters_fit=LEARNING,
        lengths=(0.2, 0.5),
        parts=5,
        windows=3,
        tokens=8,
        screened=12,
        calibration=(16, 12, 4),
        options={"eval_windows": 2},
    )
    stages.corpus(made)
    stages.prompts(made)
    return made


@pytest.fixture(scope="module")
def trained(settings):
    for stage in (
        stages.target,
        stages.draft,
        stages.generate,
        stages.distill,
        stages.export,
        stages.screen,
        stages.calibrate,
        stages.card,
    ):
        stage(settings)
    return settings


def pretrained(settings, work, **options):
    folders = settings.work / "train", settings.work / "held_out"
    return pretrain.pretrain(SHAPE, PLAN, *folders, work, settings.control, eval_windows=1, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("killed_at", [3, 6, 10])  # at half depth, grown, in the decay
def test_a_killed_training_resumes_to_identical_weights(settings, tmp_path, killed_at):
    whole = pretrained(settings, tmp_path / "whole")
    pretrained(settings, tmp_path / "killed", stop_after=killed_at)
    resumed = pretrained(settings, tmp_path / "killed")
    assert whole.step == resumed.step == 12 and whole.sequences == resumed.sequences == 4 * 2 + 8 * 3
    files = [load_file(tmp_path / run / "checkpoint.safetensors") for run in ("whole", "killed")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]), name


def test_the_number_of_threads_does_not_matter(settings, tmp_path):
    first, two = (pretrained(settings, tmp_path / str(n), threads=n) for n in (1, 2))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, two.tensors()[name]), name


def test_the_control_file_moves_the_end_while_training(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "control.json").write_text('{"grow_step": 2, "stable_steps": 3, "decay_steps": 2}')
    trainer = pretrained(settings, tmp_path / "run")
    assert trainer.step == 5 and trainer.model.config.num_hidden_layers == 2
    assert schedule(4, 2, 3, 2) > schedule(5, 2, 3, 2) == 0.0


@pytest.mark.nightly
def test_export_reloads_and_the_card_is_written(trained):
    target, draft = (AutoModelForCausalLM.from_pretrained(trained.zoo / m) for m in ("target", "draft"))
    assert target.dtype == torch.bfloat16 and target.config.num_hidden_layers == 2
    tokenizer = AutoTokenizer.from_pretrained(trained.zoo / "draft")
    assert tokenizer.decode(tokenizer("def f():\n    pass\n").input_ids) == "def f():\n    pass\n"
    assert target.generation_config.eos_token_id == draft.config.eos_token_id == tokenizer.eos_token_id
    master = load_file(trained.work / "target" / "checkpoint.safetensors")["master.model.norm.weight"]
    assert torch.equal(target.model.norm.weight, master.bfloat16())
    config = json.loads((trained.zoo / "medusa" / "config.json").read_text())
    heads = load_file(trained.zoo / "medusa" / "model.safetensors")
    assert heads["weight"].shape == (4, 2, 32, 32) and heads["bias"].shape == (4, 2, 32) and config["num_heads"] == 4
    assert heads["weight"].abs().max() > 0
    assert len(Accuracy.read(trained.zoo / "medusa").accuracy) == 4
    assert config["target_sha256"] in (trained.zoo / "README.md").read_text()


@pytest.mark.nightly
def test_generated_text_is_the_targets_own_and_resumes(trained):
    folder = trained.work / "generated"
    part = folder / "part-0000.safetensors"  # greedy
    tensors = load_file(part)
    target = trained.trained_target().eval()
    with torch.inference_mode():
        hidden = target.model(tensors["ids"].long()).last_hidden_state
        logits = target.lm_head(tensors["hidden"][:, 7:-1]).float()
    assert torch.allclose(hidden.float(), tensors["hidden"].float(), atol=0.1)
    chosen = logits.gather(-1, tensors["ids"][:, 8:, None].long())[..., 0]
    assert torch.allclose(chosen, logits.amax(-1), atol=0.02)  # bf16 rounds differently in batches of another shape
    part.unlink()
    stages.generate(trained)
    for name, tensor in load_file(part).items():
        assert torch.equal(tensor, tensors[name])


def distilled(settings, out, **options):
    """The tensors of draft and heads after (a part of) distillation, and the heads."""
    plan, target = settings.distillation, settings.trained_target()
    draft = Trainer(settings.pretrained_draft().float(), settings.draft_plan, options.pop("threads", 1))
    torch.manual_seed(0)
    fresh = distill.HeadsInTraining(plan.heads, plan.layers, 32, plan.width, TargetHead(target).embedding_scale)
    heads = Trainer(fresh, plan.plan)
    folders = settings.work / "train", settings.work / "generated", out
    distill.distill(target, draft, heads, *folders, plan, settings.generation, **options)
    return {**draft.tensors(), **{f"heads.{name}": tensor for name, tensor in heads.tensors().items()}}, heads.model


@pytest.mark.parametrize("killed_at", [pytest.param(3, marks=pytest.mark.nightly), 7])  # in plain text, in its own
@pytest.mark.nightly
def test_a_killed_distillation_resumes_to_identical_weights(trained, tmp_path, killed_at):
    whole, _ = distilled(trained, tmp_path / "whole")
    distilled(trained, tmp_path / "killed", stop_after=killed_at)
    resumed, _ = distilled(trained, tmp_path / "killed")
    threads, _ = distilled(trained, tmp_path / "threads", threads=2)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]) and torch.equal(tensor, threads[name]), name


def test_drafters_learn_from_the_states_of_the_target_s_text(trained):
    for stage in (stages.states, stages.eagle3, stages.hydra):
        stage(trained)
    target = Target.load(str(trained.zoo / "target"), dtype="float32")
    for load, name, steps in ((eagle.load, "eagle3", (5, 10)), (Hydra.load, "hydra", (10,))):
        drafter = load(target, str(trained.zoo / name), depth=2)
        with safe_open(trained.zoo / name / "model.safetensors", "pt") as file:
            facts = file.metadata()
        assert drafter.sha256 == file_hash(trained.zoo / name / "model.safetensors")
        assert facts["target_sha256"] == target.sha256
        assert int(facts["texts"]) == 5 * 4 * 24 and int(facts["tokens"]) == sum(steps) * 2 * 24
        for phase, last in enumerate(steps):
            curve = (trained.work / name / str(phase) / "learning.jsonl").read_text().splitlines()
            assert json.loads(curve[-1])["step"] == last
    before, after = (load_file(trained.work / "eagle3" / phase / "checkpoint.safetensors") for phase in "01")
    learned = [name for name in before if name.startswith("master.")]
    assert learned and all(torch.equal(before[name], after[name]) for name in learned)


def test_a_phase_is_not_resumed_after_another_one_before_it(trained, tmp_path):
    stages.states(trained)
    stages.eagle3(trained)
    again = replace(trained, work=tmp_path, zoo=tmp_path / "zoo")
    shutil.copytree(trained.zoo / "target", again.zoo / "target")
    for name in ("states", "eagle3"):
        shutil.copytree(trained.work / name, tmp_path / name)
    stages.eagle3(again)  # nothing is left to do
    (first, plan), second = trained.eagle3
    other = replace(again, eagle3=[(replace(first, loss="tv"), plan), second])
    with pytest.raises(ValueError, match="output_dir"):
        stages.eagle3(other)
    shutil.rmtree(tmp_path / "eagle3" / "0")
    with pytest.raises(ValueError, match="began_from"):
        stages.eagle3(other)


def test_acceptance_is_measured_on_the_target_s_own_text(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.zoo / "target", dtype=torch.float32)
    prompts, seen = [[5, 9, 301, 7], [44, 3]], []

    def objective(text):
        seen.append(text)
        return torch.zeros(()), [Measured(torch.zeros(()), 0.25 * len(seen), 0.5, 1)]

    shares = acceptance.by_position(model, (0, -1), objective, prompts, 6)
    assert shares == {"agreed": [0.5], "accepted": [(0.5 + 1.0) / 2]}
    for prompt, text in zip(prompts, seen[::2], strict=True):  # the greedy ones
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert text.ids.tolist() == [tokens] and text.first.tolist() == [len(prompt)]
        hidden_states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(
            text.hidden[0], torch.cat([hidden_states[0], hidden_states[-1]], -1)[0].bfloat16(), rtol=0.02, atol=0.02
        )


def test_shipped_heads_equal_the_trained_ones(trained):
    """Also with embeddings unscaled."""
    target, plan = trained.trained_target().float(), trained.distillation
    made = distill.HeadsInTraining(plan.heads, plan.layers, 32, plan.width, TargetHead(target).embedding_scale)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    assert made.scale > 1
    tensors = distill.shipped(made)
    trunk = [tensors[f"trunk_{side}.{kind}"] for side in ("in", "out") for kind in ("weight", "bias")]
    mixing = Trunk((trunk[0], trunk[1]), (trunk[2], trunk[3]), target.get_input_embeddings())
    ready = Heads(tensors["weight"], tensors["bias"], target.lm_head, mixing)
    hidden, token = torch.randn(6, 32, generator=generator), torch.arange(6)
    with torch.no_grad():
        mixed = made.trunk(hidden, target.get_input_embeddings()(token))
        expected = torch.stack([target.lm_head(made.head(k, mixed)) for k in range(4)], 1)
        torch.testing.assert_close(ready(hidden, token), expected, atol=1e-4, rtol=1e-4)
