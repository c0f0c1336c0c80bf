"""A loop over llama_decode and llama-cpp-python's generation beside the project's: the same greedy texts."""

import pytest

from experiments.engines import unified
from spec_lab.analysis import metrics
from spec_lab.models.gguf_export import convert
from tests.gguf_files import ZOO

pytest.importorskip("llama_cpp", reason="requires the extra llamacpp")
pytestmark = pytest.mark.nightly


def test_every_arm_of_llama_cpp_decodes_the_same_greedy_texts(cli, tmp_path):
    """In float32 and with one thread, where the engine's sums differ least between shapes of a batch."""
    for name in ("target", "draft"):
        convert(str(ZOO.parent / name), tmp_path / f"{name}.gguf", "f32")
    files = [
        f"target.path={tmp_path}/target.gguf",
        f"arms.draft_chain.path={tmp_path}/draft.gguf",
        "target.dtype=float32",
    ]
    short = ["prompts.limit=4", "max_new_tokens=24", "warmup=2", "threads=1", "output_dir=run"]
    code, _, errors = cli("+experiment=llama_cpp_peers", *files, *short)
    assert code == 0, errors
    requests = metrics.load(tmp_path / "run").requests
    texts = {arm: rows.sort_values("group")["text"].tolist() for arm, rows in requests.groupby("arm")}
    assert {"loop", "generate", "lookup", "assisted", "baseline", "draft_chain"} < set(texts)
    for arm, text in texts.items():
        same = sum(a == b for a, b in zip(text, texts["baseline"], strict=True))
        assert same >= 3, arm


def test_a_kv_cache_that_all_sequences_share_is_measured_beside_cells_of_their_own(capsys):
    unified.main("--batches 1 2 --contexts 20 300 --blocks 2 --threads 1".split())
    _, _, *rows = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(batch, context) for batch, context, *_ in cells] == [("1", "20"), ("1", "300"), ("2", "20"), ("2", "300")]
    for _, _, separate, shared, ratio in cells:
        assert float(ratio.split()[0]) == pytest.approx(float(shared) / float(separate), rel=0.05)
