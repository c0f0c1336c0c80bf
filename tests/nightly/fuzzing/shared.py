"""Common parts of fuzzing targets: the command line, errors that are for the user, a tiny target that decodes."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from spec_lab.cli.main import main
from spec_lab.cli.refusals import reason
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.target import Target as Model
from spec_lab.propose import Null
from spec_lab.verify import Token
from tests import checkpoints
from tests.nightly.fuzzing.harness import Input

WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text())
"""Valid, odd and hostile words of each language, and names that readers look for."""


def joined(kind: str) -> st.SearchStrategy[str]:
    """Some of the words of a kind, sometimes repeated."""
    return st.builds(
        lambda words, times: "".join(words) * times,
        st.lists(st.sampled_from(WORDS[kind]), max_size=8),
        st.sampled_from([1] * 9 + [500]),
    )


def inputs(files: Any, arguments: Any) -> st.SearchStrategy[Input]:
    """Inputs of edits and arguments."""
    return st.fixed_dictionaries({"edits": files, "arguments": arguments})


def command_line(arguments: Sequence[str]) -> int:
    """``spec-lab`` with these arguments."""
    sys.argv = ["spec-lab", *arguments]
    main()
    return 0


def exit_code(arguments: list[str]) -> int:
    """The exit code of a command, as ``spec-lab`` ends with it."""
    try:
        return command_line(arguments)
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code)
        return left.code if isinstance(left.code, int) else bool(left.code)


def refusing(act: Callable[..., Any]) -> Callable[[list[Any]], int]:
    """Wrap a function of an input's arguments: errors for the user are handled as by a command."""

    def feed(arguments: list[Any]) -> int:
        try:
            act(*arguments)
        except (OSError, ValueError) as error:
            print(f"spec_lab: {reason(error)}")
            return 1
        return 0

    return feed


def decode(target: Model, proposer: Any = None, constraint: Any = None) -> None:
    """Decode a few tokens."""
    request = Request(0, "p", (1, 2, 1, 2, 1), Sampling(1.0), 4, stop=frozenset([0] if constraint else []))
    list(fixed_group(Arm(target, proposer or Null(), Token(), CounterDraws(0), constraint), [request]))


@cache
def sound() -> Model:
    """A tiny target that has decoded."""
    with TemporaryDirectory() as folder:
        made = Model.load(str(checkpoints.checkpoint(Path(folder))), dtype="float32")
    decode(made)
    return made
