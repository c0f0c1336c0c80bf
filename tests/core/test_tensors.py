"""Files of tensors: the format of safetensors, the same bytes in every process, and nothing half-written."""

import errno
import hashlib
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from spec_lab.core.tensors import NAMES, save_tensors
from tests.full_disk import full_disk

FACTS = {f"fact {number}": str(number) for number in range(8)}


def test_the_library_reads_what_is_written(tmp_path):
    file, base = tmp_path / "a.safetensors", torch.arange(-3.0, 9.0)
    tensors = {str(dtype): base.to(dtype).reshape(3, 4) for dtype in NAMES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "columns": base.reshape(3, 4).T}
    tensors |= {"shared": base[:5], "trained": torch.nn.Parameter(base.clone()), "é\n": torch.ones(1)}
    save_tensors(tensors, file, FACTS | {"format": "pt"})
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == FACTS | {"format": "pt"}


@pytest.mark.parametrize("facts", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_the_library_where_it_has_one_order(tmp_path, facts):
    tensors = {"b": torch.rand(3, 5), "a": torch.rand(2), "c": torch.rand(())}
    save_tensors(tensors, tmp_path / "a.safetensors", facts)
    assert (tmp_path / "a.safetensors").read_bytes() == save(tensors, facts)


def test_every_process_writes_the_same_bytes(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path; from spec_lab.core.tensors import save_tensors; "
        f"save_tensors(dict(a=torch.ones(3), b=torch.arange(2)), Path(sys.argv[1]), {FACTS!r})"
    )
    digests = set()
    for number in range(3):
        file = tmp_path / f"{number}.safetensors"
        environment = os.environ | {"PYTHONHASHSEED": str(number), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code, str(file)], env=environment, check=True, timeout=120)
        digests.add(hashlib.sha256(file.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_full_disk_keeps_the_older_file_and_is_named(tmp_path):
    file = tmp_path / "a.safetensors"
    save_tensors({"a": torch.ones(3)}, file)
    with full_disk(2**16), pytest.raises(OSError, match=r"space.*a\.safetensors'") as found:
        save_tensors({"a": torch.ones(2**16)}, file)
    assert (found.value.errno, found.value.filename) == (errno.EFBIG, str(file))
    assert os.listdir(tmp_path) == [file.name] and torch.equal(load_file(file)["a"], torch.ones(3))
