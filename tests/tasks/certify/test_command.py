"""``+experiment=certify`` from the command line: its table, its files, its refusals, and parts of a user's own."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.main import zoo
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import LOOPS, QUICK, every_instance
from spec_lab.tasks.certify.pair import Certifier
from spec_lab.verify import Gumbel, Token
from tests import checkpoints

SHORT = ["+experiment=certify", "max_new_tokens=8", "task.samples=500", "task.tokens=40", "output_dir=here"]
NGRAM = [*SHORT, "proposer=ngram", "proposer.depth=3"]


@pytest.fixture(autouse=True, scope="module")
def tiny_zoo(tmp_path_factory):
    """Tiny models in the bundled models' place."""
    folder = checkpoints.zoo(tmp_path_factory.mktemp("zoo"))
    OmegaConf.register_new_resolver("zoo", lambda name: str(folder / name), replace=True)
    yield
    OmegaConf.register_new_resolver("zoo", zoo, replace=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer instances."""
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))


@pytest.fixture
def thorough(monkeypatch, quick):
    """All of them."""
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", prove)


@pytest.fixture
def certificate(tmp_path):
    return lambda: json.loads((tmp_path / "here" / "certificate.json").read_text())


# The composed pair


@pytest.mark.usefixtures("thorough")
def test_a_lossless_pair_is_certified(flat_cli, certificate, tmp_path):
    code, output, errors = flat_cli(*NGRAM, "task.samples=600")
    assert code == 0, errors
    written = certificate()
    assert written["complete"] is True and written["certified"] is True and written["failed"] == []
    assert written["worst_tv"] < 1e-12
    assert written["instances"] == [instance.name for instance in every_instance()]
    assert written["seed"] == 0 and written["sampling"]["temperature"] == 1
    assert {"commit", "versions", "machine", "threads", "weights_sha256", "alpha", "power"} <= set(written)
    assert written["weights_sha256"]["target"] and written["versions"]["torch"]
    (pair,) = written["pairs"]
    assert (pair["proposer"], pair["drawn"], pair["verifier"]) == ("ngram", "deterministic", "token")
    assert pair["certified"] == "exact" and pair["declared_lossless"] is True and pair["failed"] is None
    assert pair["exact"]["instances"] == len(every_instance()) and pair["exact"]["drafts"] == "proposer"
    names = ["joint distribution of four tokens", "towards the draft", "mode"]
    assert [check["name"] for check in pair["sampled"]] == names
    assert [check["samples"] for check in pair["sampled"]][::2] == [600, 40]
    assert pair["rejected"] == []
    assert written["control"]["p_value"] < 1e-6
    assert json.loads((tmp_path / "here" / "manifest.json").read_text())["config"]["task"]["samples"] == 600
    assert "ngram deterministic token lossless, proved" in output
    assert f"Certificate and figure: {tmp_path / 'here'}" in output


def test_a_proposer_that_drafts_nothing_is_not_certified(flat_cli, certificate):
    longest = ["proposer.min_ngram=20", "proposer.max_ngram=20"]
    code, output, _ = flat_cli(*NGRAM, *longest, "sampling=greedy", "task.samples=2000", "task.tokens=400")
    written = certificate()
    assert written["sampling"]["temperature"] == 1, "temperature 0 has nothing to sample"
    (pair,) = written["pairs"]
    assert pair["exact"]["drafted"] == 0 and {check["drafted"] for check in pair["sampled"]} == {0}
    assert min(check["detectable"] for check in pair["sampled"]) < 0.15, "enough samples, had it drafted"
    assert pair["certified"] is None and written["certified"] is False and code == 1
    assert "'ngram' drafted no token" in pair["failed"] and "lossless" not in pair["result"]
    assert "'ngram' drafted no token" in output


@pytest.mark.nightly
@pytest.mark.usefixtures("thorough")
def test_the_run_s_own_sampling_is_certified_if_it_is_random(flat_cli, certificate):
    assert flat_cli(*NGRAM, "task.tokens=0", "sampling.temperature=0.7", "sampling.top_k=2")[0] == 0
    written = certificate()
    assert (written["sampling"]["temperature"], written["sampling"]["top_k"]) == (0.7, 2)
    assert written["pairs"][0]["exact"]["instances"] == len(every_instance()) + len(LOOPS)
    assert written["certified"] is True


# Many pairs


@pytest.mark.nightly
def test_pairs_that_do_not_fit_are_left_out_and_all_others_examined_once(flat_cli, certificate):
    more = ["+proposer@arms.none=none", "+verifier@verifiers.kseq=kseq", "+verifier@verifiers.token=token"]
    code, output, errors = flat_cli(*NGRAM, "task.tokens=0", *more, "+verifier@verifiers.match=match")
    assert code == 0, errors
    pairs = [(pair["proposer"], pair["verifier"]) for pair in certificate()["pairs"]]
    assert pairs == [("ngram", "token"), ("ngram", "match"), ("none", "token"), ("none", "match")]
    left = ["ngram (deterministic), kseq", "none (deterministic), kseq"]
    assert certificate()["left_out"] == left and "; ".join(left) in output
    assert "none deterministic match lossless" in output


@pytest.mark.nightly
def test_lossy_verifiers_get_their_total_variation_and_no_certificate(flat_cli, certificate):
    code, output, errors = flat_cli(*NGRAM, "verifier=relaxed", "+verifier@verifiers.typical=typical")
    assert code == 0, errors
    written = certificate()
    assert written["certified"] is None and written["worst_tv"] is None, "nothing here declares itself lossless"
    for pair in written["pairs"]:
        assert pair["certified"] is pair["failed"] is None and pair["exact"]["worst_tv"] > 0.01
        assert [check["name"] for check in pair["sampled"]] == ["joint distribution of four tokens"]
    assert "relaxed lossy" in output and "typical lossy" in output and "FAILS" not in output


# Refusals and interruptions


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.samples=0", "task.samples must be a whole number of 1 or more, not 0"),
        ("task.tokens=-1", "task.tokens must be a whole number of 0 or more, not -1"),
        ("task.samples=many", "task.samples must be a whole number of 1 or more, not 'many'"),
        ("task.tokenz=3", "there is no option task.tokenz; did you mean task.tokens=3?"),
        ("+task.tokenz=3", "task.tokenz: did you mean task.tokens?"),
        ("verifier=kseq", "verifier 'kseq' supports drafts drawn iid; proposer 'ngram' draws 'deterministic'"),
    ],
)
@pytest.mark.one_in(3)
def test_wrong_options_and_pairs_are_refused_by_name(flat_cli, tmp_path, override, message):
    code, _, errors = flat_cli(*NGRAM, override)
    assert code == 1
    assert message in errors and "Traceback" not in errors
    assert not (tmp_path / "here").exists()


@pytest.mark.nightly
def test_an_interrupt_keeps_the_finished_pairs(flat_cli, certificate, monkeypatch):
    plain, begun = Certifier.examine, []

    def impatient(self, proposer, verifier, tick):
        begun.append(verifier.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return plain(self, proposer, verifier, tick)

    monkeypatch.setattr(Certifier, "examine", impatient)
    code, _, errors = flat_cli(*NGRAM, "task.tokens=0", "+verifier@verifiers.match=match")
    assert code == 130 and begun == ["token", "match"]
    assert "Interrupted" in errors and "1 of 2 pairs" in errors
    assert certificate()["complete"] is False
    assert [pair["verifier"] for pair in certificate()["pairs"]] == ["token"]


# A user's own verifier and proposer, in a module and configs outside the package

MODULE = """
import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain, forest
from spec_lab.core.randomness import Key, Purpose
from spec_lab.decode.proposer import Proposer
from spec_lab.verify import Lenient, Token, Verifier


class Verifies(Verifier):
    accepts = frozenset({"iid", "deterministic"})

    def __init__(self, lenience=1.0, lossless=True):
        self.name, self.lenience, self.lossless = "mine", lenience, lossless
        self.children = None

    def __call__(self, draft, p):
        if len(draft.shape.children[0]) == self.children:
            raise KeyError("sibling")
        return Lenient(self.lenience)(draft, p)


class Fussy(Verifies):
    def __init__(self, children):
        super().__init__()
        self.children = children


class Uniform(Proposer):
    name, drawn, nodes = "uniform", "iid", 1

    def __init__(self, target, skew):
        self.skew = skew

    def propose(self, batch):
        count, v = len(batch.sequences), batch.target.vocabulary
        keys = [Key(*live.key, Purpose.DRAFT) for live in batch.sequences]
        token = batch.draws.pick(torch.ones(count, v), keys)
        q = torch.ones(count, v, dtype=torch.float64)
        q[:, 0] *= self.skew
        q_row = np.append(np.arange(count), np.full(count, -1))
        return Draft(forest((chain(1),) * count), token, self.drawn, q / q.sum(-1, keepdim=True), q_row)
"""
FILES = {
    "verifier/mine.yaml": "_target_: my_parts.Verifies\nlenience: 1.0\nlossless: true\n",
    "verifier/fussy.yaml": "_target_: my_parts.Fussy\nchildren: 2\n",
    "proposer/uniform.yaml": "_target_: my_parts.Uniform\nskew: 1.0\n",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The options that find them."""
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "my_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return ["--config-dir", str(tmp_path / "conf")]


def test_a_verifier_wrongly_declared_lossless_fails_and_the_first_wrong_text_is_named(flat_cli, certificate, mine):
    code, output, errors = flat_cli(*mine, *NGRAM, "verifier=mine", "verifier.lenience=0.9")
    assert code == 1, errors
    written = certificate()
    assert written["complete"] is True and written["certified"] is False
    (why,) = written["failed"]
    assert why.startswith("ngram (deterministic), mine: after [")
    assert (
        "FAILS: ngram (deterministic), mine: after [" in output and "] token " in output and "has probability" in output
    )
    assert "Traceback" not in errors


@pytest.mark.nightly
def test_a_verifier_that_raises_leaves_no_folder_and_the_corrected_command_uses_it(flat_cli, tmp_path, mine):
    tree = ["proposer=draft_tree", "proposer.tree=2", "verifier=fussy", "task.tokens=0"]
    code, _, errors = flat_cli(*mine, *SHORT, *tree)
    assert code == 1 and "Traceback" not in errors
    assert f"verifier 'mine' raised KeyError: 'sibling' ({tmp_path / 'my_parts.py'}:" in errors
    assert not (tmp_path / "here").exists()
    code, _, errors = flat_cli(*mine, *SHORT, *tree, "verifier.children=7")
    assert code == 0, errors


@pytest.mark.nightly
def test_a_bias_that_only_samples_show_is_confirmed_and_fails(flat_cli, certificate, monkeypatch):
    """Gumbel drafts are not enumerated. A verifier that reuses their noise is rejected, and again with more samples."""

    def leaky(self, draft, p):
        verdict = Token()(replace(draft, drawn="without_replacement", noise=None), p)
        return replace(verdict, residual=honest(self, draft, p).residual)

    honest = Gumbel.__call__
    monkeypatch.setattr(Gumbel, "__call__", leaky)
    tree = ["proposer=draft_tree", "proposer.tree=2x1", "proposer.drawn=gumbel"]
    options = [*tree, "verifier=gumbel", "task.tokens=0", "task.samples=800"]
    code, output, errors = flat_cli(*SHORT, *options)
    assert code == 1, errors
    (pair,) = certificate()["pairs"]
    assert pair["certified"] is None
    (again,) = pair["rejected"]
    assert (again["name"], again["samples"], again["seed"]) == ("joint distribution of four tokens", 3200, 1)
    assert pair["failed"].startswith("joint distribution of four tokens: rejected twice, then with p = ")
    assert "FAILS: draft_tree (gumbel), gumbel: joint distribution of four tokens: rejected twice" in output


@pytest.mark.nightly
def test_a_pair_that_raises_is_reported_and_the_others_are_kept(flat_cli, certificate, mine):
    options = ["proposer=draft_tree", "proposer.tree=2", "+verifier@verifiers.fussy=fussy", "task.tokens=0"]
    code, output, errors = flat_cli(*mine, *SHORT, *options)
    assert code == 1, errors
    written = certificate()
    assert written["complete"] is True and written["certified"] is False
    assert [(pair["verifier"], pair["certified"]) for pair in written["pairs"]] == [("token", "exact")]
    assert "draft_tree (deterministic), mine: verifier 'mine' raised KeyError" in written["failed"][0]
    assert "FAILS" in output
    code, _, errors = flat_cli(*mine, *SHORT, *options, "seed=1")
    assert code == 1 and "already holds another run" in errors


@pytest.mark.nightly
@pytest.mark.parametrize(("skew", "failed"), [(1.0, False), (3.0, True)])
def test_a_proposer_of_the_user_is_enumerated_with_its_own_drafts(flat_cli, certificate, mine, skew, failed):
    code, _, errors = flat_cli(*mine, *SHORT, "proposer=uniform", f"proposer.skew={skew}")
    assert code == failed, errors
    (pair,) = certificate()["pairs"]
    assert pair["exact"]["drafts"] == "proposer" and pair["certified"] == (None if failed else "exact")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "certified", "result"),
    [
        (["proposer.drawn=gumbel", "verifier=gumbel", "task.samples=2500"], "sampled", "lossless, sampled"),
        (["verifier=cascade"], None, "lossy, exact for its own target"),
    ],
    ids=["gumbel", "cascade"],
)
def test_what_cannot_be_enumerated_is_sampled_and_a_cascade_has_its_own_target(
    flat_cli, certificate, options, certified, result
):
    code, output, errors = flat_cli(*SHORT, *options)
    assert code == 0, errors
    (pair,) = certificate()["pairs"]
    assert (pair["proposer"], pair["certified"]) == ("draft_chain", certified) and result in output


def test_too_few_samples_certify_nothing(flat_cli, certificate):
    """The control, a wrong verifier, is not detected either: the run prints that and fails."""
    code, output, _ = flat_cli(*SHORT, "proposer.drawn=gumbel", "verifier=gumbel", "task.samples=20", "task.tokens=0")
    assert code == 1
    written = certificate()
    assert written["certified"] is False and written["pairs"][0]["certified"] is None
    assert "The control was not detected" in output
