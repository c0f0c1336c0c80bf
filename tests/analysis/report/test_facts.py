"""The configuration and the machine of a run, in words."""

import pytest

from spec_lab.analysis.report.facts import device_text


@pytest.mark.parametrize(
    ("target", "more", "text"),
    [
        ({"device": "auto"}, {"device": "cuda:0"}, "cuda:0"),
        ({"device": None}, {"device": "cuda:1"}, "cuda:1"),
        ({}, {"device": "cpu"}, "cpu"),
        ({"device": None}, {}, "cpu"),
        ({"device": "cuda"}, {}, "cuda"),
        ({}, {}, None),
        ({"device": "auto", "device_map": "balanced"}, {"device": "cuda:0"}, "device map balanced"),
        ({"device": "auto", "tensor_parallel": True}, {"device": "cuda:0", "ranks": 2}, "2 ranks"),
    ],
)
def test_the_device_is_where_the_target_was(target, more, text):
    assert device_text({"config": {"target": target}, **more}) == text
