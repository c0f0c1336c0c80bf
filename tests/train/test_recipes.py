"""Every recipe: its loss is that of what it writes, it learns, resumes, and its proposer drafts what it has learned."""

import errno
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from spec_lab.core import tensors
from spec_lab.drafters.block.train import BlockRecipe
from spec_lab.drafters.draft_model.train import DraftRecipe
from spec_lab.drafters.eagle.train import Eagle3Recipe
from spec_lab.drafters.eagle.train_eagle1 import Eagle1Recipe
from spec_lab.drafters.hydra.train import HydraRecipe
from spec_lab.drafters.kangaroo.train import KangarooRecipe
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.measure import measure
from spec_lab.drafters.medusa.train import MedusaRecipe
from spec_lab.drafters.mtp.train import MtpRecipe
from spec_lab.drafters.pard.train import PardRecipe
from spec_lab.drafters.peagle.train import PEagleRecipe
from spec_lab.models.packed import unpack
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import calibrate as calibration
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.step_costs import StepCosts
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks import train as task
from spec_lab.train.fit import FitPlan, fit
from spec_lab.train.recipe import TargetHead, settings_of
from spec_lab.train.record import answer, record
from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Plan, Trainer
from tests import checkpoints
from tests.oracles import eagle, hydra, kangaroo, medusa, mtp, pard
from tests.propose.lab import COLD, WARM, decode, emitted, plain_greedy, requests
from tests.tiny import COMMON, VOCABULARY, tiny_target
from tests.train.texts import files, texts

RECIPES = {
    "eagle1": Eagle1Recipe(depth=3, intermediate_size=24),
    "eagle1 of 2 layers, no bias": Eagle1Recipe(depth=2, layers=2, bias=False),
    "medusa": MedusaRecipe(heads=3),
    "medusa with trunk": MedusaRecipe(heads=2, layers=2, trunk=20, decay=0.5),
    "medusa of its authors": MedusaRecipe(heads=2, layers=2, layout="medusa"),
    "medusa of frequent tokens": MedusaRecipe(heads=2, draft_vocab_size=20),
    "hydra": HydraRecipe(heads=3, layers=2),
    "hydra with prefix": HydraRecipe(heads=2, layers=3, arch="prefix-mlp", decay=0.5, loss="tv"),
    "hydra with identities": HydraRecipe(heads=3, identity_skip=True),
    "mtp": MtpRecipe(intermediate_size=24),
    "mtp of qwen": MtpRecipe(unrolls=2, layout="qwen", loss="reverse_kl"),
    "kangaroo": KangarooRecipe(depth=3, exit_layer=1),
    "kangaroo of two layers": KangarooRecipe(depth=2, exit_layer=1, layers=2, loss="tv"),
    "draft": DraftRecipe(depth=3, hidden_size=16, layers=2, heads=2, intermediate_size=24, tied=False),
    "block": BlockRecipe(block_size=4, layers=2, decay=0.5, taps=(1, 2)),
    "block of dspark": BlockRecipe(
        kind="dspark", block_size=3, predicts_next=True, layers=1, rank=6, l1=0.9, confidence=1.0, taps=(2,)
    ),
    "block of rnn": BlockRecipe(kind="dspark", block_size=3, predicts_next=True, layers=1, rank=6, markov="rnn"),
    "block of dflash2": BlockRecipe(kind="dflash2", block_size=4, layers=1, rank=6, candidates=5, loss="kl"),
    "block of domino": BlockRecipe(kind="domino", block_size=3, predicts_next=True, layers=1, rank=6, state_size=8),
    "block of frequent tokens": BlockRecipe(
        kind="dspark", block_size=3, layers=1, rank=6, draft_vocab_size=45, window=3, causal=True
    ),
    "peagle": PEagleRecipe(unrolls=3, decay=0.5, layers=2, draft_vocab_size=None, taps=(0, 1, 2)),
    "pard": PardRecipe(depth=3, decay=0.5, hidden_size=16, layers=2, heads=2, intermediate_size=24),
}
SIZES = 4, 2, 8
"""Attention heads, shared heads and head dimension of the tiny target, which drafters have by default."""
DEPTH = 2
"""Layers of the target."""
every_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = checkpoints.checkpoint(tmp_path_factory.mktemp("target"), torch.float64)
    loaded = Target.load(str(folder), dtype="float64")
    lm_head(loaded).data.mul_(6)  # probabilities further from uniform
    return loaded


def begun(recipe, target, folder):
    """A drafter in float64 with random weights that bfloat16 represents, and its loss."""
    training = recipe.begin(target, files(target, folder / "texts", states=recipe.states(target)), 0)
    training.module.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in training.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * parameter.shape[-1] ** -0.5 / 2).copy_(parameter.bfloat16())
    return training


def published(recipe, module, target, folder):
    sha256 = recipe.write(module, target, folder / "drafter", {"method": recipe.name})
    assert len(sha256) == 64
    w = {name: tensor.double() for name, tensor in load_file(folder / "drafter" / "model.safetensors").items()}
    tied = {"lm_head.weight": w["model.embed_tokens.weight"]} if "model.embed_tokens.weight" in w else {}
    return tied | w


def embedding(target):
    return target.model.get_input_embeddings().weight


def lm_head(target):
    return target.model.get_output_embeddings().weight


def drafted(name, w, target, ids, hidden, column, depth):
    """The logits ``[V]`` at each draft position of a chain after a column, by the oracles."""
    e, head = embedding(target), lm_head(target)
    known = hidden[: column + 1]
    if name.startswith("kangaroo"):  # which reads exit states of the same tokens, as the target computes them
        known = hidden[: column + 2, : len(head[0])]
        yield head @ kangaroo.adapter(w, known, SIZES)[-1]
        return
    for k in range(depth):
        after = ids[column + 1 : column + 2 + k]
        if name.startswith("eagle1"):
            known = torch.cat([known, eagle.eagle1(w, e, ids[1 : column + 2 + k], known, SIZES)[-1:]])
            yield head @ known[-1]
        elif name.startswith("mtp"):
            arguments = 0, RECIPES[name].layout, DEPTH, e, ids[1 : column + 2 + k], known, SIZES
            known = torch.cat([known, mtp.mtp(w, *arguments)[-1:]])
            yield head @ known[-1]
        elif name.startswith("hydra"):
            yield hydra.logits(w, e, known, after, SIZES, RECIPES[name].layers, lambda x: head @ x)
        elif name.startswith("peagle"):
            yield peagle_levels(w, ids[1 : column + 2], hidden[: column + 1, : -len(head[0])], k)[-1]
        elif name == "medusa of its authors":
            yield medusa.of_authors(w, hidden[column], k)
        elif name.startswith("medusa"):
            yield head @ own_medusa(w, hidden[column], e[ids[column + 1]], k)
        else:
            masks = k if name.startswith("pard") else 0  # which stand in for the drafted tokens
            text = ids[: column + 2 + k - masks].tolist()
            yield pard.levels(w, text, VOCABULARY, masks + 1, VOCABULARY, 2, (2, 2, 8))[-1]


def peagle_levels(w, tokens, taps, masks):
    """The logits of a text's rows and mask rows, by the oracle of EAGLE-3."""
    w = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in w.items()}
    read = torch.cat([tokens, torch.full((masks,), VOCABULARY - 1)])
    both = torch.cat([taps, w["mask_hidden"][0].expand(masks, -1)])
    known = oracle_features(w, both)
    return eagle.eagle3(w, w["embed_tokens.weight"], read, known, SIZES, ())[1]


def oracle_features(w, taps):
    return eagle.eagle3_features(w, list(taps.chunk(3, -1)), ())


def divergence(kind, p, q):
    if kind == "kl":
        return -(p * q.log()).sum()
    return (q * (q / p).log()).sum() if kind == "reverse_kl" else 1 - torch.minimum(p, q).sum()


def own_medusa(w, state, embedded, head):
    silu = torch.nn.functional.silu
    if "trunk_in.weight" in w:
        inner = w["trunk_in.weight"] @ torch.cat([state, embedded]) + w["trunk_in.bias"]
        state = state + w["trunk_out.weight"] @ silu(inner) + w["trunk_out.bias"]
    for weight, bias in zip(w["weight"][head], w["bias"][head], strict=True):
        state = state + silu(weight @ state + bias)
    return state


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("block")])  # see test_block.py
def test_the_estimate_is_that_of_the_written_drafter(name, target, tmp_path):
    recipe = RECIPES[name]
    started = begun(recipe, target, tmp_path)
    started.module.eval()
    text = texts(target, states=recipe.states(target))
    with torch.no_grad():
        loss, measured = started.objective(text)
    w = published(recipe, started.module, target, tmp_path)
    assert len(measured) == recipe.depth
    same = name.startswith(("draft", "kangaroo"))  # whose rows do not depend on the draft position
    for k, level in enumerate(measured):
        rows = []
        for row, (ids, hidden) in enumerate(zip(text.ids, text.hidden, strict=True)):
            for column in range(len(ids) - 2 - (0 if same else k)):
                token = column + 2 + (0 if same else k)
                if not text.first[row] <= token < text.length[row]:
                    continue
                p = (lm_head(target) @ hidden[token - 1, -len(lm_head(target)[0]) :]).softmax(-1)
                logits = list(drafted(name, w, target, ids, hidden, column, 1 if same else k + 1))[-1]
                some = started.module.ids if getattr(recipe, "draft_vocab_size", None) else torch.arange(len(logits))
                best, p, q = p.argmax(), p[some], logits[some].softmax(-1)
                accepted = p[q.argmax()] if name.startswith("medusa") else torch.minimum(p, q).sum()
                learned = int(best in some)
                value = divergence(recipe.loss, p / p.sum(), q) * learned
                rows.append([value, accepted, best == some[q.argmax()], learned])
        sums = torch.tensor(rows, dtype=torch.float64).sum(0)
        expected = sums[:3] / torch.tensor([sums[3], len(rows), len(rows)])
        direct = torch.tensor([float(value) for value in level[:3]], dtype=torch.float64)
        torch.testing.assert_close(direct, expected, rtol=1e-4, atol=1e-5)
    if not name.startswith(("eagle1", "draft", "kangaroo")):
        total = sum(recipe.decay**k * float(level.loss) for k, level in enumerate(measured))
        assert float(loss) == pytest.approx(total, rel=1e-5)


@every_recipe
def test_every_trained_weight_has_a_gradient_and_the_target_s_have_none(name, target, tmp_path):
    started = begun(RECIPES[name], target, tmp_path)
    if started.advance is not None:
        started.advance(0.5)
    loss, measured = started.objective(texts(target, states=RECIPES[name].states(target)))
    loss.backward()
    assert [key for key, p in started.module.named_parameters() if p.grad is None or not bool(p.grad.any())] == []
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert len(measured) == RECIPES[name].depth


@every_recipe
def test_texts_shorter_than_a_chain_are_no_error(name, target, tmp_path):
    started = begun(RECIPES[name], target, tmp_path)
    loss, measured = started.objective(texts(target, length=3, first=(1, 1), states=RECIPES[name].states(target)))
    loss.backward()
    assert torch.isfinite(loss) and len(measured) == RECIPES[name].depth


@pytest.mark.one_in(3)
@every_recipe
def test_a_training_learns_resumes_to_the_same_weights_and_its_proposer_drafts(name, target, tmp_path):
    recipe = RECIPES[name]
    paths = files(target, tmp_path / "texts", states=recipe.states(target))
    plan = FitPlan(6, rows=4, part=2, warmup=2, every=1, plan=Plan(muon_rate=2e-2, adamw_rate=1e-2, weight_decay=0.0))

    def trained(folder, stop_after=None):
        training = recipe.begin(target, paths, 0)
        trainer = Trainer(training.module, plan.plan, 2, torch.float32)
        fit(trainer, training.objective, paths, tmp_path / folder, plan, dict(training.facts), stop_after)
        return training.module, trainer.tensors()

    module, whole = trained("whole")
    trained("parts", stop_after=5)
    _, resumed = trained("parts")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
    curve = [json.loads(line)["loss"][0] for line in (tmp_path / "whole" / "learning.jsonl").read_text().splitlines()]
    assert sum(curve[-3:]) < 0.97 * sum(curve[:3])

    recipe.write(module.eval(), target, tmp_path / "drafter", {"method": recipe.name})
    proposer = recipe.load(target, tmp_path / "drafter", recipe.depth)
    wanted = requests(COLD, new=8)
    group, steps = decode(target, proposer, wanted)
    assert emitted(group) == [plain_greedy(target.model, request.tokens, 8) for request in wanted]
    assert any(len(tree) == recipe.depth + 1 for info in steps for tree in info.draft.shape.trees)
    decode(target, proposer, requests(WARM, new=8))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: MedusaRecipe(layout="medusa", trunk=8), "task.recipe.trunk"),
        (lambda: DraftRecipe(hidden_size=30, heads=4), "task.recipe.hidden_size"),
        (lambda: PardRecipe(heads=3), "task.recipe.hidden_size"),
    ],
)
def test_wrong_options_are_named(make, option):
    with pytest.raises(ValueError, match=option.replace(".", r"\.")):
        make()


def test_noise_of_eagle1_is_uniform_scaled_by_the_length_and_the_same_whenever_a_text_is_seen(target, tmp_path):
    started = begun(Eagle1Recipe(), target, tmp_path)
    text = texts(target, count=3, length=40)
    noise = started.objective._noise(text)
    assert torch.equal(noise, started.objective._noise(text))
    assert torch.equal(noise[1:2, :39], started.objective._noise(text.rows(slice(1, 2))))
    assert not torch.equal(noise[0], noise[1])
    for row, length in zip(noise, text.length, strict=True):
        half = 0.1 * 512 / int(length)
        assert 0.9 * half < float(row.max()) <= half and -half <= float(row.min()) < -0.9 * half
    quiet = begun(Eagle1Recipe(noise=0), target, tmp_path)
    noisy, plain = (float(training.objective(text)[0].detach()) for training in (started, quiet))
    assert noisy != plain
    assert float(started.objective(text)[0].detach()) == noisy
    for training in (started, quiet):
        training.module.eval()
    assert float(started.objective(text)[0].detach()) == plain


@torch.no_grad()
def test_pard_s_levels_are_those_of_plain_forwards_over_mask_tokens(target, tmp_path):
    started, text = begun(RECIPES["pard"], target, tmp_path), texts(target)
    plain = RECIPES["pard"].begin(target, [], 0).module.double()
    plain.load_state_dict(started.module.state_dict())
    plain.set_attn_implementation("eager")
    drafts, unread = started.objective.drafts, torch.empty(0)
    levels = list(drafts.states(text, unread, unread))
    torch.testing.assert_close(levels[0][0], plain.model(text.ids).last_hidden_state, rtol=0, atol=1e-5)
    for level, (states, columns) in enumerate(levels):
        for row, place in (columns >= 0).nonzero().tolist():
            read = [*text.ids[row, : columns[row, place] + 2].tolist(), *[VOCABULARY] * level]
            last = plain.model(torch.tensor([read])).last_hidden_state[0, -1]
            torch.testing.assert_close(states[row, place], last, rtol=0, atol=1e-5)
        assert drafts.logits(level, states).shape[-1] == VOCABULARY


MEDUSA = {name: recipe for name, recipe in RECIPES.items() if name.startswith("medusa")}


@pytest.mark.parametrize("name", MEDUSA)
def test_held_out_answers_are_measured_as_the_target_s_own_continuations_are(name, target, tmp_path):
    """The target answers the same prompts once while they are recorded, and once while heads are measured."""
    recipe, wanted = MEDUSA[name], requests(COLD, new=12)
    begun = recipe.begin(target, [], 0)
    recipe.write(begun.module, target, tmp_path / "drafter", {"method": recipe.name})
    paths = record(target, answer(target, wanted, 2, 0), recipe.states(target), tmp_path / "texts", 2, 2, rest=True)
    begun.calibrate(tmp_path / "drafter", paths, 0.0)
    heads = read_medusa(str(tmp_path / "drafter"), target)
    expected = measure(target, heads, [request.tokens for request in wanted], tokens=12)
    expected.write(tmp_path, rare=2)
    assert Accuracy.read(tmp_path / "drafter") == Accuracy.read(tmp_path)
    assert expected.samples == len(wanted) * (12 - recipe.heads)
    assert (tmp_path / "drafter" / "calibration.json").exists()


@pytest.mark.nightly
def test_trained_medusa_heads_draft_as_documented(quick_cli, tmp_path, monkeypatch):
    """Also: equal trainings write equal files, and the second one reads the answers of the first."""
    run = [
        option
        for option in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
        if not option.startswith("proposer=")
    ]
    options = ["proposer=none", "max_new_tokens=8", "task.rows=2", "task.warmup_steps=1", *SHORT["medusa"]]
    for folder in ("first", "second"):
        code, _, errors = quick_cli(
            "+experiment=train_medusa", *run[:-1], *options, "batch_size=4", f"output_dir={folder}"
        )
        assert code == 0, errors
    first, second = (tmp_path / folder / "drafter" for folder in ("first", "second"))
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert sorted(file.name for file in first.iterdir()) == [
        "README.md", "calibration_1.json", "config.json", "model.safetensors",
    ]  # fmt: skip
    card, summary = (first / "README.md").read_text(), json.loads((first.parent / "summary.json").read_text())
    assert f"Tau {1 + summary['measured_length']:.2f}" in card and summary["sha256"] in card
    assert "batch_size=4 +experiment=train_medusa" in card and "output_dir" not in card

    def free(target, proposers, *_):
        return StepCosts(dict.fromkeys(proposers, 1.0), dict.fromkeys(proposers, 0.0), 10)

    monkeypatch.setattr(calibration, "time_steps", free)
    monkeypatch.setenv("SPEC_LAB_CACHE", str(tmp_path / "cache"))
    code, _, errors = quick_cli(*run[:-1], "proposer=medusa", f"proposer.path={first}", "output_dir=decoded")
    assert code == 0, errors
    measured = json.loads((first / "calibration_1.json").read_text())
    assert measured["samples"] > 0 and measured["temperature"] == 1 and len(measured["accuracy"]) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("folder", ["texts", "training", "drafter"])
def test_a_full_disk_ends_a_training_and_is_named(quick_cli, tmp_path, monkeypatch, folder):
    run = [
        option
        for option in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
        if not option.startswith("proposer=")
    ]
    options = ["proposer=none", "max_new_tokens=8", "task.rows=2", "task.warmup_steps=1", *SHORT["medusa"]]
    write = tensors.replacing

    def full(path):
        if path.parent.name == folder:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path)

    monkeypatch.setattr(tensors, "replacing", full)
    code, _, errors = quick_cli("+experiment=train_medusa", *run, *options, "batch_size=2")
    assert code == 1 and "Traceback" not in errors and str(Path("swept") / folder) in errors, errors
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(tensors, "replacing", write)
    code, _, errors = quick_cli("+experiment=train_medusa", *run, *options, "batch_size=2")
    assert code == 0, errors


SHORT = {
    "eagle1": ["task.recipe.depth=2"],
    "eagle3": ["task.recipe.unrolls=2", "task.recipe.draft_vocab_size=20"],
    "medusa": ["task.recipe.heads=2"],
    "hydra": ["task.recipe.heads=2"],
    "mtp": ["task.recipe.unrolls=2"],
    "kangaroo": ["task.recipe.depth=2", "task.recipe.exit_layer=1"],
    "peagle": ["task.recipe.unrolls=2", "task.recipe.layers=1", "task.recipe.draft_vocab_size=20"],
    **{
        name: [f"task.recipe.block_size={size}", "task.recipe.layers=1"]
        for name, size in {"block": 3, "dspark": 2, "dflash2": 3, "domino": 2}.items()
    },
    "draft": ["task.recipe.depth=2", "task.recipe.hidden_size=16", "task.recipe.heads=2"],
    "pard": ["task.recipe.depth=2", "task.recipe.hidden_size=16", "task.recipe.heads=2"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.one_in(9)
def test_each_recipe_trains_from_the_command_line(quick_cli, name, tmp_path):
    run = checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
    run = [option for option in run if not option.startswith("proposer=")]
    more = ["proposer=none", "max_new_tokens=8", "task.rows=2", "task.warmup_steps=1", "batch_size=4"]
    code, output, errors = quick_cli(f"+experiment=train_{name}", *run, *more, *SHORT[name])
    assert code == 0, errors
    summary = json.loads((tmp_path / "swept" / "summary.json").read_text())
    assert summary["steps"] == 3 and len(summary["accepted"]) == len(summary["agreed"]) == 2
    first, second = summary["accepted"]
    assert summary["estimated_length"] == pytest.approx(first + first * second, abs=1e-3)
    assert 0 <= summary["measured_length"] <= 2
    assert (tmp_path / "swept" / "drafter" / "model.safetensors").exists()
    assert "estimated" in output and "of memory beside the target" in " ".join(output.split())


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [0, 2])
def test_ctrl_c_leaves_with_130_and_states_what_is_saved_and_how_to_resume(quick_cli, steps, tmp_path, monkeypatch):
    run = [
        option
        for option in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
        if not option.startswith("proposer=")
    ]
    more = ["proposer=none", "task.rows=2", "task.warmup_steps=1", "task.save_seconds=1e-9", "batch_size=4"]
    command = ["+experiment=train_draft", *run, *more, *SHORT["draft"]]
    plain = Trainer.update

    def interrupted(self, *arguments):
        if self.step == steps:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        code, _, errors = quick_cli(*command)
    assert code == 130
    assert "same command with output_dir=swept" in errors and "resume" in errors
    assert ("2 training steps" in errors) == (steps == 2)
    assert not (tmp_path / "swept" / "summary.json").exists()
    taken = []

    def counted(self, *arguments):
        taken.append(self.step)
        return plain(self, *arguments)

    monkeypatch.setattr(Trainer, "update", counted)
    code, _, errors = quick_cli(*command)
    assert code == 0, errors
    assert taken == list(range(steps, 3))


def test_every_level_of_pard_learns_texts_by_heart(target):
    text = texts(target, count=2, length=10, first=(1,))
    head = lm_head(target)
    text = Texts(text.ids, text.first, text.length, 40 * head[text.ids.roll(-1, 1)] / head.square().sum(-1).mean())
    training = PardRecipe(depth=3, decay=1.0, hidden_size=32, layers=2, heads=2, intermediate_size=48).begin(
        target, [], 0
    )
    optimiser = torch.optim.AdamW(training.module.parameters(), lr=1e-2)
    for _ in range(50):
        loss, measured = training.objective(text)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert all(level.agreed == 1 and level.accepted > 0.9 for level in measured), measured


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma", "phi"])
def test_logits_of_the_lm_head_are_those_of_the_model(family):
    TargetHead.of(tiny_target(family))


def test_targets_that_scale_or_cap_logits_after_their_lm_head_are_refused():
    sizes = COMMON | dict(num_key_value_heads=2, head_dim=8)
    caps = dict(attn_logit_softcapping=None, final_logit_softcapping=1.0, layer_types=["full_attention"] * 2)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **caps)).double().eval()
    capped = Target(CausalLM(gemma), None, "tiny-gemma2", 64, "", 0.0)
    for refused in (tiny_target("cohere"), tiny_target("granite", logits_scaling=8.0), capped):
        for recipe in RECIPES.values():
            with pytest.raises(Unsupported, match=refused.name):
                recipe.begin(refused, [], 0)


def test_a_checkpoint_of_a_recipe_with_another_option_is_refused(target, tmp_path):
    paths, plan = files(target, tmp_path / "texts"), FitPlan(1, rows=4, part=2)

    def learn(recipe):
        begun = recipe.begin(target, paths, 0)
        trainer = Trainer(begun.module, plan.plan, 1, torch.float32)
        fit(trainer, begun.objective, paths, tmp_path / "out", plan, settings_of(recipe, target, begun))

    learn(HydraRecipe(heads=2))
    learn(HydraRecipe(heads=2))
    for other in (HydraRecipe(heads=2, loss="tv"), HydraRecipe(heads=2, decay=0.5), HydraRecipe(heads=3)):
        with pytest.raises(ValueError, match="output_dir"):
            learn(other)
    assert settings_of(HydraRecipe(loss="tv"), target, HydraRecipe().begin(target, paths, 0))["tv"] == "1 - alpha"


class NamedDevices(TorchFunctionMode):
    """Fails where a tensor is made without a device."""

    MAKE = torch.arange, torch.empty, torch.full, torch.ones, torch.randn, torch.tensor, torch.zeros

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in self.MAKE or "device" in (kwargs or {}), (func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*RECIPES, "eagle3"])
def test_losses_are_computed_where_the_target_is(name, target, tmp_path):
    recipe = Eagle3Recipe(2, draft_vocab_size=20) if name == "eagle3" else RECIPES[name]
    started, text = begun(recipe, target, tmp_path), texts(target, states=recipe.states(target))
    with NamedDevices():
        started.objective(text)


def test_held_out_acceptance_is_that_of_all_texts_together_however_they_are_filed(target, tmp_path):
    started, text = begun(HydraRecipe(heads=2), target, tmp_path), texts(target, 5, 12, first=(2, 8, 3))
    started.module.eval()
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        text.rows(slice(2 * number, 2 * number + 2)).write(path)
    with torch.no_grad():
        _, measured = started.objective(text)
    for part in (1, 2):
        accepted, agreed = task._held_out(started.objective, paths, part, torch.device("cpu"))
        assert accepted == pytest.approx([float(level.accepted) for level in measured], abs=1e-4)
        assert agreed == pytest.approx([float(level.agreed) for level in measured], abs=1e-4)


def test_files_of_texts_are_bounded_and_a_rest_is_kept_or_stated(target, tmp_path, caplog):
    wanted = answer(target, requests(WARM, new=3, prompts=[(3, 1, 4), (1, 5), (9, 2), (6, 5), (3, 5)]), 4, 0)
    sizes = 2, 4
    kept = record(target, wanted, (-1,), tmp_path / "kept", *sizes, rest=True)
    assert [len(Texts.read(path)) for path in kept] == [2, 2, 1] and not caplog.records
    paths = record(target, wanted, (-1,), tmp_path / "left", *sizes)
    assert [len(Texts.read(path)) for path in paths] == [2, 2]
    assert "1 of 5" in caplog.text


def short(tmp_path, *more):
    run = [
        option
        for option in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
        if not option.startswith("proposer=")
    ]
    return [*run, "proposer=none", "max_new_tokens=8", "task.rows=2", "batch_size=4", *more]


@pytest.mark.parametrize(
    ("name", "given", "option"),
    [
        ("draft", "sampling.temperature=0.7", "sampling.temperature=0.7"),
        ("draft", "sampling.top_k=5", "sampling.top_k=5"),
        ("draft", "sampling.top_p=0.9", "sampling.top_p=0.9"),
        ("draft", "sampling.min_p=0.1", "sampling.min_p=0.1"),
        ("draft", "sampling.repetition_penalty=1.1", "sampling.repetition_penalty=1.1"),
        ("draft", "sampling.temperature=0 task.answers=2", "task.answers"),
        ("draft", "task.passes=0.1", "task.passes"),
        ("eagle3", "task.recipe.heads=3", "task.recipe.heads"),
        ("mtp", "task.recipe.heads=32", "task.recipe.heads"),
        ("kangaroo", "task.recipe.exit_layer=2", "task.recipe.exit_layer"),
        ("eagle3", "task.recipe.from_target=true task.recipe.heads=2", "from_target"),
        ("peagle", "task.recipe.loss=tau", "task.recipe.retention must be 1"),
        ("eagle3", "task.recipe.weights=dpace task.recipe.retention=0.5", "task.recipe.retention must be 1"),
    ],
)
@pytest.mark.each_value
def test_what_cannot_be_trained_is_refused_before_the_target_answers(quick_cli, tmp_path, name, given, option):
    code, _, errors = quick_cli(f"+experiment=train_{name}", *short(tmp_path, *given.split()))
    (line,) = [line for line in errors.splitlines() if line.startswith("spec_lab: ")]
    assert code == 1 and option in line
    assert not (tmp_path / "swept" / "texts").exists() and not (tmp_path / "swept" / "manifest.json").exists()


def test_a_training_that_diverges_ends_with_code_1_and_keeps_its_texts(quick_cli, tmp_path):
    command = ["+experiment=train_draft", *short(tmp_path, "task.learning_rate=1e36", *SHORT["draft"])]
    code, _, errors = quick_cli(*command)
    assert code == 1 and "step 2" in errors and "task.learning_rate" in errors
    assert len(list((tmp_path / "swept" / "texts").iterdir())) == 3
    assert (tmp_path / "swept" / "manifest.json").exists()


@every_recipe
@pytest.mark.one_in(3)
def test_a_packed_target_gives_the_same_loss_and_gradients(name, tmp_path):
    folder = str(checkpoints.checkpoint(tmp_path / "target"))
    packed, plain = (Target.load(folder, dtype="float32") for _ in "12")
    assert unpack(plain.model)
    paths, results = files(plain, tmp_path / "texts", states=RECIPES[name].states(plain)), []
    for target in (packed, plain):
        training = RECIPES[name].begin(target, paths, 0)
        loss = training.objective(Texts.read(paths[0]))[0]
        results.append([loss, *torch.autograd.grad(loss, list(training.module.parameters()), allow_unused=True)])
    for gradient, other in zip(*results, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["medusa", "medusa with trunk"])
def test_medusa_heads_begin_with_written_ones(target, tmp_path, name):
    recipe, training = RECIPES[name], begun(RECIPES[name], target, tmp_path)
    recipe.write(training.module, target, tmp_path / "drafter", {})
    fresh = recipe.begin(target, [], 1).module
    recipe.resume(fresh, target, tmp_path / "drafter")
    for parameter, written in zip(fresh.parameters(), training.module.parameters(), strict=True):
        assert torch.equal(parameter.double(), written)
    with pytest.raises(ValueError, match=r"start=.*set task\.recipe\.heads="):
        MedusaRecipe(heads=5).resume(fresh, target, tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"start=.* names a drafter to begin with, and hydra"):
        HydraRecipe().resume(fresh, target, tmp_path / "drafter")


@pytest.mark.parametrize(
    ("options", "wanted"), [({"layout": "medusa"}, "layout=own"), ({"draft_vocab_size": 7}, "draft_vocab_size=null")]
)
def test_options_with_which_no_heads_can_be_begun_with_say_what_to_set(target, tmp_path, options, wanted):
    with pytest.raises(ValueError, match=rf"start=.*: set task\.recipe\.{wanted}, or start=null"):
        MedusaRecipe(**options).resume(None, target, tmp_path)
