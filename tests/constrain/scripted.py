"""Scripted controllers, and the exact distribution of their output under the Branch protocol, by hand."""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import exp, prod

from spec_lab.constrain.control import ANY, Branch, Event
from spec_lab.tasks.certify.toy_models import code, logits
from tests.constrain.narrow import V

# The oracle: the protocol as documented, token by token, in plain Python -------------------------------------------


def oracle(world, make, most, stop=frozenset()):
    """The output distribution of autoregressive decoding: every sequence of the request with its finish reason."""

    def step(controller, event, text, lineage, forks):
        try:
            branches = controller.step(event)
            controllers = [controller] + [controller.fork() for _ in branches[1:]]
        except Exception:
            return [(1.0, [(lineage, text, "stuck")])]
        if not branches:
            return [(1.0, [(lineage, text, "constraint")])]
        ways = [follow(controller, branches[0], 0, text, lineage, forks + (len(branches) > 1))]
        for number in range(1, len(branches)):
            child_lineage = (*lineage, forks, number)
            ways.append(follow(controllers[number], branches[number], number, text, child_lineage, 0))
        return [(prod(p for p, _ in every), [end for _, some in every for end in some]) for every in product(*ways)]

    def follow(controller, branch, number, text, lineage, forks):
        text = text[: len(text) - branch.backtrack]
        if len(text) == most:
            return [(1.0, [(lineage, text, "length")])]
        lists = {tuple(branch.ff[0]): 1.0} if branch.allow is None else sampled(branch, text)
        if not lists:
            return [(1.0, [(lineage, text, "stuck")])]
        outcomes = []
        for tokens, p in lists.items():
            rest = append(deepcopy(controller), branch.backtrack, tokens, number, text, lineage, forks)
            outcomes += [(p * more, ended) for more, ended in rest]
        return outcomes

    def sampled(branch, text):
        row = logits(world.probabilities(len(text))[0])[code(text, world.v)]
        row = {t: x for t, x in enumerate(row) if branch.allow == ANY or t in branch.allow}
        weights = {
            t: exp(x - max(row.values())) for t, x in row.items()
        }  # impossible tokens have very small probabilities
        whole = {tokens[0]: tuple(tokens) for tokens in branch.ff}
        return {whole.get(t, (t,)): p / sum(weights.values()) for t, p in weights.items() if p}

    def append(controller, backtrack, tokens, number, text, lineage, forks):
        for index, token in enumerate(tokens, start=1):
            text += (token,)
            if token in stop:
                return [(1.0, [(lineage, text, "stop")])]
            if index < len(tokens) and len(text) == most:
                return [(1.0, [(lineage, text, "length")])]
        return step(controller, Event(number, backtrack, tokens), text, lineage, forks)

    counts = Counter()
    for p, ended in step(make(None), Event(), (), (), 0):
        counts[tuple((text, finish) for _, text, finish in sorted(ended))] += p
    return dict(counts)


# Controllers ---------------------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """Returns the actions of ``script``, a function of all events so far."""

    script: object
    events: tuple = ()

    def step(self, event):
        self.events += (event,)
        return self.script(self.events)

    def fork(self):
        return Scripted(self.script, self.events)


def text_after(events):
    text = ()
    for event in events:
        text = text[: len(text) - event.backtrack] + event.append
    return text


GO = [Branch()]


def at(position, action, otherwise=GO):
    """``action`` at this event, ``otherwise`` (an action or a script) at all others."""

    def script(events):
        if len(events) - 1 == position:
            return action
        return otherwise(events) if callable(otherwise) else otherwise

    return script


def when(token, action, otherwise=GO):
    """``action`` after the first ``token``; ``otherwise`` at all other events."""

    def script(events):
        ends = [bool(event.append) and event.append[-1] == token for event in events]
        return action if ends[-1] and sum(ends) == 1 else otherwise

    return script


def after(count, action):
    """``action`` once this many tokens are there."""

    def script(events):
        lengths = [len(text_after(events[: n + 1])) for n in range(len(events))]
        return action if lengths[-1] >= count and max(lengths[:-1], default=-1) < count else GO

    return script


def masks(events):
    text = text_after(events)
    return [Branch(allow={(len(text) + sum(text)) % V, 1, 2})]


def twice(events):
    """Remove the first 1; then, at the first 0 after another token, remove both."""
    back = [event.backtrack for event in events]
    last = text_after(events)[-1:]
    if not any(back):
        return [Branch(1, {0, 2, 3})] if last == (1,) else GO
    return [Branch(2)] if last == (0,) and 2 not in back and len(text_after(events)) > 1 else GO


def nested(events):
    """Two at the start; the second of them forks again after its first token."""
    branches = tuple(event.branch for event in events)
    return [Branch(), Branch()] if branches in ((0,), (0, 1)) and len(events) == len(branches) else GO


def three(events):
    """Three branches at the start, each with a plan of its own."""
    if len(events) == 1:
        return [Branch(allow={0}), Branch(), Branch(allow=None, ff=((1, 0),))]
    return GO if events[1].branch < 2 else [Branch(allow={1})]


ALONE = {
    "nothing": at(9, []),
    "masks": masks,
    "takes back the token": when(1, [Branch(1, {0, 2, 3})]),
    "takes back the token, whatever comes": when(2, [Branch(1)]),
    "takes back several": after(2, [Branch(2, {0, 1, 2})]),
    "takes back several at the limit": after(3, [Branch(2)]),
    "takes back, and back again": twice,
    "takes back several, puts one": after(2, [Branch(2, None, ((3,),))]),
    "takes back one, puts several": after(2, [Branch(1, None, ((0, 2),))]),
    "takes back, puts after what is sampled": after(2, [Branch(1, ANY, ((0, 2), (1, 1, 0)))]),
    "puts after what is sampled": at(9, [], [Branch(ff=((1, 2), (2, 0)))]),
    "puts after what is sampled under a mask": at(9, [], [Branch(allow={0, 1, 2}, ff=((3, 3), (1, 1, 0)))]),
    "puts at the start": at(0, [Branch(allow=None, ff=((1, 3),))]),
    "puts later": at(1, [Branch(allow=None, ff=((2, 2),))]),
    "only puts": at(9, [], [Branch(allow=None, ff=((1, 2),))]),
    "puts past the limit": at(1, [Branch(allow=None, ff=((1, 2, 3, 0),))]),
    "stops": when(1, []),
    "stops at the start": at(0, []),
    "stops after two": after(2, []),
    "allows nothing": when(1, [Branch(allow=())]),
    "breaks": when(1, None),
}

SEVERAL = {
    "two at the start": at(0, [Branch(), Branch()]),
    "three at the start": three,
    "two after a token": at(1, [Branch(), Branch(allow={0})]),
    "three after a token": at(1, [Branch(), Branch(), Branch(allow=None, ff=((1,),))]),
    "two at the limit": after(2, [Branch(), Branch(1)]),
    "nested": nested,
    "after it put tokens": at(0, [Branch(allow=None, ff=((1,),))], at(1, [Branch(), Branch(1)])),
    "with other tokens taken back": when(1, [Branch(1, {0}), Branch(0), Branch(1)]),
    "one stops": lambda events: [] if events[-1].branch == 1 else [Branch(), Branch()] if len(events) == 1 else GO,
    "one breaks": lambda events: None if events[-1].branch == 1 else [Branch(), Branch()] if len(events) == 1 else GO,
}
