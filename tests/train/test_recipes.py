"""Every recipe: its loss is that of what it writes, it learns, resumes, and its proposer drafts what it has learned."""

import json

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.models.target import Target
from spec_lab.train.draft import DraftRecipe
from spec_lab.train.eagle import Eagle3Recipe
from spec_lab.train.eagle1 import Eagle1Recipe
from spec_lab.train.fit import FitPlan, fit
from spec_lab.train.hydra import HydraRecipe
from spec_lab.train.medusa import MedusaRecipe
from spec_lab.train.mtp import MtpRecipe
from spec_lab.train.pard import PardRecipe
from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Plan, Trainer
from tests import checkpoints
from tests.oracles import eagle, hydra, medusa, mtp, pard
from tests.propose.lab import COLD, WARM, decode, emitted, plain_greedy, requests
from tests.tiny import VOCABULARY
from tests.train.texts import files, texts

RECIPES = {
    "eagle1": Eagle1Recipe(depth=3, intermediate_size=24),
    "eagle1 of 2 layers, no bias": Eagle1Recipe(depth=2, layers=2, bias=False),
    "medusa": MedusaRecipe(heads=3),
    "medusa with trunk": MedusaRecipe(heads=2, layers=2, trunk=20, decay=0.5),
    "medusa of its authors": MedusaRecipe(heads=2, layers=2, layout="medusa"),
    "hydra": HydraRecipe(heads=3, layers=2),
    "hydra with prefix": HydraRecipe(heads=2, layers=3, arch="prefix-mlp", decay=0.5, loss="tv"),
    "hydra with identities": HydraRecipe(heads=3, identity_skip=True),
    "mtp": MtpRecipe(intermediate_size=24),
    "mtp of qwen": MtpRecipe(unrolls=2, layout="qwen", loss="reverse_kl"),
    "draft": DraftRecipe(depth=3, hidden_size=16, layers=2, heads=2, intermediate_size=24, tied=False),
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
    found = recipe.begin(target, files(target, folder / "texts"), 0)
    found.module.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * parameter.shape[-1] ** -0.5 / 2).copy_(parameter.bfloat16())
    return found


def published(recipe, module, target, folder):
    sha256 = recipe.write(module, target, folder / "drafter", {"method": recipe.name})
    assert len(sha256) == 64
    w = {name: one.double() for name, one in load_file(folder / "drafter" / "model.safetensors").items()}
    tied = {"lm_head.weight": w["model.embed_tokens.weight"]} if "model.embed_tokens.weight" in w else {}
    return tied | w


def embedding(target):
    return target.causal_lm.model.get_input_embeddings().weight


def lm_head(target):
    return target.causal_lm.model.get_output_embeddings().weight


def drafted(name, w, target, ids, hidden, column, depth):
    """The logits ``[V]`` at each draft position of a chain after a column, by the oracles."""
    e, head = embedding(target), lm_head(target)
    known = hidden[: column + 1]
    for k in range(depth):
        after = ids[column + 1 : column + 2 + k]
        if name.startswith("eagle1"):
            known = torch.cat([known, eagle.eagle1(w, e, ids[1 : column + 2 + k], known, SIZES)[-1:]])
            yield head @ known[-1]
        elif name.startswith("mtp"):
            own = 0, RECIPES[name].layout, DEPTH, e, ids[1 : column + 2 + k], known, SIZES
            known = torch.cat([known, mtp.mtp(w, *own)[-1:]])
            yield head @ known[-1]
        elif name.startswith("hydra"):
            yield hydra.logits(w, e, known, after, SIZES, RECIPES[name].layers, lambda x: head @ x)
        elif name == "medusa of its authors":
            yield medusa.of_authors(w, hidden[column], k)
        elif name.startswith("medusa"):
            yield head @ own_medusa(w, hidden[column], e[ids[column + 1]], k)
        else:
            masks = k if name.startswith("pard") else 0  # which stand in for the drafted tokens
            text = ids[: column + 2 + k - masks].tolist()
            yield pard.levels(w, text, VOCABULARY, masks + 1, VOCABULARY, 2, (2, 2, 8))[-1]


def divergence(kind, p, q):
    if kind == "kl":
        return -(p * q.log()).sum()
    return (q * (q / p).log()).sum() if kind == "reverse_kl" else -torch.minimum(p, q).sum().log()


def own_medusa(w, state, embedded, head):
    silu = torch.nn.functional.silu
    if "trunk_in.weight" in w:
        inner = w["trunk_in.weight"] @ torch.cat([state, embedded]) + w["trunk_in.bias"]
        state = state + w["trunk_out.weight"] @ silu(inner) + w["trunk_out.bias"]
    for weight, bias in zip(w["weight"][head], w["bias"][head], strict=True):
        state = state + silu(weight @ state + bias)
    return state


@every_recipe
def test_the_estimate_is_that_of_the_written_drafter(name, target, tmp_path):
    recipe = RECIPES[name]
    found = begun(recipe, target, tmp_path)
    found.module.eval()
    text = texts(target)
    with torch.no_grad():
        loss, measured = found.objective(text)
    w = published(recipe, found.module, target, tmp_path)
    assert len(measured) == recipe.depth
    same = name == "draft"  # whose rows do not depend on the draft position
    for k, one in enumerate(measured):
        rows = []
        for row, (ids, hidden) in enumerate(zip(text.ids, text.hidden, strict=True)):
            for column in range(len(ids) - 2 - (0 if same else k)):
                token = column + 2 + (0 if same else k)
                if not text.first[row] <= token < text.length[row]:
                    continue
                p = (lm_head(target) @ hidden[token - 1]).softmax(-1)
                q = list(drafted(name, w, target, ids, hidden, column, 1 if same else k + 1))[-1].softmax(-1)
                accepted = p[q.argmax()] if name.startswith("medusa") else torch.minimum(p, q).sum()
                rows.append([divergence(recipe.loss, p, q), accepted, p.argmax() == q.argmax()])
        expected = torch.tensor(rows, dtype=torch.float64).mean(0)
        direct = torch.tensor([float(one.loss), one.accepted, one.agreed], dtype=torch.float64)
        torch.testing.assert_close(direct, expected, rtol=1e-4, atol=1e-5)
    if not name.startswith(("eagle1", "draft")):
        total = sum(recipe.decay**k * float(one.loss) for k, one in enumerate(measured))
        assert float(loss) == pytest.approx(total, rel=1e-5)


@every_recipe
def test_every_trained_weight_has_a_gradient_and_the_target_s_have_none(name, target, tmp_path):
    found = begun(RECIPES[name], target, tmp_path)
    loss, measured = found.objective(texts(target))
    loss.backward()
    assert [one for one, p in found.module.named_parameters() if p.grad is None or not bool(p.grad.any())] == []
    assert all(p.grad is None and not p.requires_grad for p in target.causal_lm.model.parameters())
    assert len(measured) == RECIPES[name].depth


@every_recipe
def test_texts_shorter_than_a_chain_are_no_error(name, target, tmp_path):
    found = begun(RECIPES[name], target, tmp_path)
    loss, measured = found.objective(texts(target, length=3, first=(1, 1)))
    loss.backward()
    assert torch.isfinite(loss) and len(measured) == RECIPES[name].depth


@pytest.mark.one_in(2)
@every_recipe
def test_a_training_learns_resumes_to_the_same_weights_and_its_proposer_drafts(name, target, tmp_path):
    recipe, paths = RECIPES[name], files(target, tmp_path / "texts")
    plan = FitPlan(6, rows=4, part=2, warmup=2, every=1, plan=Plan(muon_rate=2e-2, adamw_rate=1e-2, weight_decay=0.0))

    def trained(folder, stop_after=None):
        own = recipe.begin(target, paths, 0)
        trainer = Trainer(own.module, plan.plan, 2, torch.float32)
        fit(trainer, own.objective, paths, tmp_path / folder, plan, dict(own.facts), stop_after)
        return own.module, trainer.tensors()

    module, whole = trained("whole")
    trained("parts", stop_after=5)
    _, resumed = trained("parts")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(one, resumed[key]) for key, one in whole.items())
    curve = [json.loads(line)["loss"][0] for line in (tmp_path / "whole" / "learning.jsonl").read_text().splitlines()]
    assert sum(curve[-3:]) < 0.97 * sum(curve[:3])

    recipe.write(module.eval(), target, tmp_path / "drafter", {"method": recipe.name})
    proposer = recipe.load(target, tmp_path / "drafter", recipe.depth)
    wanted = requests(COLD, new=8)
    group, steps = decode(target, proposer, wanted)
    assert emitted(group) == [plain_greedy(target.causal_lm.model, one.tokens, 8) for one in wanted]
    assert any(len(tree) == recipe.depth + 1 for info in steps for tree in info.draft.shape.trees)
    decode(target, proposer, requests(WARM, new=8))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: MedusaRecipe(layout="medusa", trunk=8), "task.recipe.trunk"),
        (lambda: MedusaRecipe(heads=0), "task.recipe.heads"),
        (lambda: HydraRecipe(arch="transformer"), "task.recipe.arch"),
        (lambda: HydraRecipe(loss="ce"), "task.recipe.loss"),
        (lambda: MtpRecipe(decay=2), "task.recipe.decay"),
        (lambda: MtpRecipe(heads=0), "task.recipe.heads"),
        (lambda: MtpRecipe(unrolls=None), "task.recipe.unrolls"),
        (lambda: Eagle1Recipe(noise=-1), "task.recipe.noise"),
        (lambda: Eagle1Recipe(bias="no"), "task.recipe.bias"),
        (lambda: DraftRecipe(hidden_size=30, heads=4), "task.recipe.hidden_size"),
        (lambda: PardRecipe(depth=0), "task.recipe.depth"),
        (lambda: PardRecipe(heads=3), "task.recipe.hidden_size"),
        (lambda: Eagle3Recipe(decay=2), "task.recipe.decay"),
    ],
)
def test_wrong_options_are_named(make, option):
    with pytest.raises(ValueError, match=option.replace(".", r"\.")):
        make()


def test_noise_of_eagle1_is_uniform_scaled_by_the_length_and_the_same_whenever_a_text_is_seen(target, tmp_path):
    found = begun(Eagle1Recipe(), target, tmp_path)
    text = texts(target, count=3, length=40)
    noise = found.objective._noise(text)
    assert torch.equal(noise, found.objective._noise(text))
    assert torch.equal(noise[1:2], found.objective._noise(text.rows(slice(1, 2))))
    assert not torch.equal(noise[0], noise[1])
    for row, length in zip(noise, text.length, strict=True):
        half = 0.1 * 512 / int(length)
        assert 0.9 * half < float(row.max()) <= half and -half <= float(row.min()) < -0.9 * half
    quiet = begun(Eagle1Recipe(noise=0), target, tmp_path)
    noisy, plain = (float(one.objective(text)[0].detach()) for one in (found, quiet))
    assert noisy != plain
    assert float(found.objective(text)[0].detach()) == noisy
    for one in (found, quiet):
        one.module.eval()
    assert float(found.objective(text)[0].detach()) == plain


@torch.no_grad()
def test_pard_s_levels_are_those_of_plain_forwards_over_mask_tokens(target, tmp_path):
    found, text = begun(RECIPES["pard"], target, tmp_path), texts(target)
    plain = RECIPES["pard"].begin(target, [], 0).module.double()
    plain.load_state_dict(found.module.state_dict())
    plain.set_attn_implementation("eager")
    drafts, unread = found.objective.drafts, torch.empty(0)
    levels = list(drafts.states(text.ids, unread, unread))
    torch.testing.assert_close(levels[0], plain.model(text.ids).last_hidden_state[:, 1:], rtol=0, atol=1e-5)
    for level, states in enumerate(levels):
        for column in range(states.shape[1]):
            masks = torch.full((len(text), level), VOCABULARY)
            read = torch.cat([text.ids[:, : column + 2], masks], -1)
            last = plain.model(read).last_hidden_state[:, -1]
            torch.testing.assert_close(states[:, column], last, rtol=0, atol=1e-5)
        assert drafts.logits(level, states).shape[-1] == VOCABULARY


SHORT = {
    "eagle1": ["task.recipe.depth=2"],
    "eagle3": ["task.recipe.unrolls=2", "task.recipe.draft_vocab_size=20"],
    "medusa": ["task.recipe.heads=2"],
    "hydra": ["task.recipe.heads=2"],
    "mtp": ["task.recipe.unrolls=2"],
    "draft": ["task.recipe.depth=2", "task.recipe.hidden_size=16", "task.recipe.heads=2"],
    "pard": ["task.recipe.depth=2", "task.recipe.hidden_size=16", "task.recipe.heads=2"],
}


@pytest.mark.parametrize("name", SHORT)
def test_each_recipe_trains_from_the_command_line(quick_cli, name, tmp_path):
    run = checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2)
    run = [one for one in run if not one.startswith("proposer=")]
    more = ["proposer=none", "max_new_tokens=8", "task.rows=2", "task.warmup_steps=1", "batch_size=4"]
    code, output, errors = quick_cli(f"+experiment=train_{name}", *run, *more, *SHORT[name])
    assert code == 0, errors
    summary = json.loads((tmp_path / "swept" / "summary.json").read_text())
    assert summary["steps"] == 3 and len(summary["accepted"]) == len(summary["agreed"]) == 2
    first, second = summary["accepted"]
    assert summary["estimated_length"] == pytest.approx(first + first * second, abs=1e-3)
    assert 0 <= summary["measured_length"] <= 2
    assert (tmp_path / "swept" / "drafter" / "model.safetensors").exists()
    assert "estimated" in output


@pytest.mark.parametrize("steps", [0, 2])
def test_ctrl_c_leaves_with_130_and_states_what_is_saved_and_how_to_resume(quick_cli, steps, tmp_path, monkeypatch):
    run = [one for one in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2) if not one.startswith("proposer=")]
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
    own = lm_head(target)
    text = Texts(text.ids, text.first, text.length, 40 * own[text.ids.roll(-1, 1)] / own.square().sum(-1).mean())
    found = PardRecipe(depth=3, decay=1.0, hidden_size=32, layers=2, heads=2, intermediate_size=48).begin(target, [], 0)
    optimiser = torch.optim.AdamW(found.module.parameters(), lr=1e-2)
    for _ in range(50):
        loss, measured = found.objective(text)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert all(one.agreed == 1 and one.accepted > 0.9 for one in measured), measured
