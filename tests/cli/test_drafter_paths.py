"""Drafters are checked with the target's config.json, and downloaded, before the target is loaded."""

import json
from importlib.util import find_spec

import pytest
from hydra import compose, initialize_config_dir

import spec_lab.cli.main  # noqa: F401  registers the resolvers of configs
from spec_lab.cli.build import build, rebuilt
from spec_lab.cli.bundled import conf
from spec_lab.cli.bundled import zoo as bundled
from spec_lab.cli.drafter_paths import check_drafters
from spec_lab.cli.start import check_tried
from spec_lab.core.options import WrongOption
from spec_lab.models.gguf_export import convert
from spec_lab.models.hub import cached_folder
from spec_lab.models.target import Target
from tests.checkpoints import checkpoint, zoo
from tests.drafters.block_drafters import dflash
from tests.drafters.eagle_heads import eagle3, speculators, written
from tests.gguf_files import tiny as tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A target whose weights are missing, so that loading it fails, and drafters for it."""
    folder = zoo(tmp_path_factory.mktemp("zoo"))
    (folder / "target" / "model.safetensors").unlink()
    return folder


def check(tiny, *overrides):
    with initialize_config_dir(conf(), version_base="1.3"):
        check_drafters(compose("config", [f"target.path={tiny / 'target'}", "output_dir=out", *overrides]))


def test_drafters_of_every_part_are_downloaded_before_the_target_is_loaded(hub, tiny):
    for name in ("eagle3", "draft", "medusa", "hydra"):
        hub.add(f"some/{name}", tiny / name)
    check(
        tiny, "proposer=union", "proposer@proposer.parts.heads=eagle", "proposer.parts.heads.path=some/eagle3",
        "+proposer@arms.hydra=hydra", "arms.hydra.path=some/hydra",
        "+peers.assisted={_target_: spec_lab.tasks.peers.Generate.assisted, path: some/draft}",
    )  # fmt: skip
    sent = hub.downloads()
    assert sent[:3] == ["config.json"] * 3 and sent.count("model.safetensors") == 3 and "tokenizer.json" in sent


EAGLE = eagle3(32, 61)
WRONG = {
    "hidden size": (eagle3(48, 61), "proposer=eagle", r"hidden_size 48, but the hidden size .* is 32"),
    "wide": (eagle3(32, 61, wide=48), "proposer=eagle", r"target_hidden_size 48, but the hidden size .* is 32"),
    "vocabulary": (
        eagle3(32, 64, vocab_size=64),
        "proposer=eagle",
        r"vocab_size 64, but the number of tokens .* is 61",
    ),
    "speculators": (speculators(*eagle3(48, 61)), "proposer=eagle", r"hidden size .* is 32"),
    "layers": (dflash(32, ids=(0, 30)), "proposer=block", r"target_layer_ids \[0, 30\], but .* has \d layers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_drafter_of_another_target_is_refused_by_its_config_alone(hub, tiny, tmp_path, case):
    (config, tensors), proposer, message = WRONG[case]
    hub.add("some/head", written(tmp_path / "head", config, tensors))
    with pytest.raises(ValueError, match=rf"^proposer\.path=some/head: its config\.json has .*{message}"):
        check(tiny, proposer, "proposer.path=some/head")
    assert hub.downloads() == ["config.json"]


@pytest.mark.skipif(not find_spec("gguf"), reason="requires the extra llamacpp")
@pytest.mark.parametrize("kind", ["target=gguf", "target=zoo"])
def test_a_drafter_of_another_target_than_a_gguf_file_is_refused(tmp_path, kind):
    convert(str(tiny_llama(tmp_path / "checkpoint")), tmp_path / "model.gguf")
    head = written(tmp_path / "head", *eagle3(8, 61))
    options = [kind, f"target.path={tmp_path / 'model.gguf'}", "proposer=eagle", f"proposer.path={head}"]
    wrong = pytest.raises(ValueError, match=r"hidden_size 8, but the hidden size .*model\.gguf is ")
    with initialize_config_dir(conf(), version_base="1.3"), wrong:
        check_drafters(compose("config", [*options, "output_dir=out"]))


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("eagel:some/head", "eagel is not an option of conf/proposer"),
        ("eagle:no/such", r"proposer\.path=no/such: there is no folder"),
        ("eagle:some/head", r"hidden_size 48, but the hidden size .* is 32"),
        ("kangaroo", r"proposer\.path has no default"),
    ],
)
def test_drafters_that_a_recommendation_cannot_try_are_refused_at_the_start(hub, tiny, tmp_path, drafter, why):
    hub.add("some/head", written(tmp_path / "head", *eagle3(48, 61)))
    given = [f"target.path={tiny / 'target'}", "output_dir=out", "proposer=none", f"task.drafters=[ngram,{drafter}]"]
    wrong = pytest.raises(ValueError, match=rf"^task\.drafters=.*: .*{why}")
    with initialize_config_dir(conf(), version_base="1.3"), wrong:
        check_tried(compose("config", ["task=recommend", *given]))


def test_another_reading_of_a_drafter_is_built_without_the_hub(hub, tmp_path):
    folder = zoo(tmp_path / "zoo")
    commit = hub.add("some/head", folder / "eagle3", revision="v1")
    target = Target.load(str(folder / "target"), dtype="float32")
    with initialize_config_dir(conf(), version_base="1.3"):
        options = ["proposer=eagle", "proposer.path=some/head", "proposer.revision=v1", "proposer.depth=1"]
        config = compose("config", [*options, "proposer.nodes=null", "proposer.rerank=false", "output_dir=out"])
    first = build(config, "proposer", target=target)
    hub.requests.clear()
    other = rebuilt(config, target, {"rope": "interleaved"})
    assert hub.requests == [] and other.sha256 == first.sha256 and cached_folder("some/head", "v1").endswith(commit)
    assert (first.reading.values["rope"], other.reading.values["rope"]) == ("neox", "interleaved")


def test_a_draft_model_has_the_targets_number_of_tokens_or_its_tokens_are_intersected(hub, tiny, tmp_path):
    hub.add("some/draft", checkpoint(tmp_path / "draft", vocab_size=70))
    with pytest.raises(ValueError, match=r"^proposer\.path=some/draft: .* vocab_size 70, .* is 61"):
        check(tiny, "proposer=draft_chain", "proposer.path=some/draft")
    assert hub.downloads() == ["config.json"]
    check(tiny, "proposer=draft_chain", "proposer.path=some/draft", "proposer.vocabularies=intersect")


def test_a_file_of_tokens_must_exist(hub, tiny, tmp_path):
    hub.add("some/head", tiny / "eagle3")
    head, file = ["proposer=eagle", "proposer.path=some/head"], tmp_path / "tokens.txt"
    with pytest.raises(FileNotFoundError, match=r"^proposer\.tokens=.*tokens\.txt:30: there is no such file"):
        check(tiny, *head, f"proposer.tokens='{file}:30'")
    assert not hub.downloads()
    file.write_text("1\n")
    check(tiny, *head, f"proposer.tokens='{file}:30'")


def test_a_drafter_of_another_kind_is_refused_with_the_proposer_that_reads_it(hub, tiny):
    for folder, why in (
        (tiny / "hydra", r"hydra_num_heads: these are Hydra heads, not an EAGLE head: set proposer=hydra"),
        (bundled("medusa"), r"trunk_size: these are Medusa heads, not an EAGLE head: set proposer=medusa"),
    ):
        with pytest.raises(ValueError, match=rf"^proposer\.path=.*: its config\.json has {why}$"):
            check(tiny, "proposer=eagle", f"proposer.path={folder}")


def test_paths_and_revisions_that_are_not_there_are_refused_with_their_option(hub, tiny, tmp_path):
    hub.add("some/head", tiny / "eagle3")
    hub.files["some/pickles", "main"] = {"config.json": json.dumps(EAGLE[0]).encode(), "pytorch_model.bin": b"pickle"}
    for options, error, message in (
        (["proposer.path=no/such"], OSError, r"^proposer\.path=no/such: there is no folder no/such, and the hub has"),
        (["proposer.path=some/pickles"], ValueError, r"^proposer\.path=.*spec-lab convert some/pickles OUT"),
        (["proposer.path=some/head", "proposer.revision=v2"], WrongOption, r"^proposer\.revision must be a branch"),
        (
            [f"proposer.path={tiny / 'eagle3'}", "proposer.revision=main"],
            WrongOption,
            r"^proposer\.revision .*local folder: set proposer\.revision=null",
        ),
        ([f"proposer.path={tmp_path}"], OSError, r"holds no EAGLE head: config\.json is missing"),
    ):
        with pytest.raises(error, match=message):
            check(tiny, "proposer=eagle", *options)


def test_a_run_ends_with_the_drafters_fault_before_the_targets(cli, hub, tiny, tmp_path):
    hub.add("some/head", written(tmp_path / "head", *eagle3(48, 61)))
    options = [f"target.path={tiny / 'target'}", "proposer=eagle", "proposer.path=some/head"]
    code, _, said = cli(*options, f"output_dir={tmp_path / 'out'}")
    assert code == 1 and "proposer.path=some/head: its config.json has" in said and "Traceback" not in said
