"""A wrong verifier that ``certify`` must detect: it declares that it is lossless, and is not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict, Verifier
from toy_plugin.agree import Agree


@dataclass(frozen=True)
class Careless(Verifier):
    """Ends where ``Agree`` does, but then emits from p as if nothing had been rejected there."""

    name = "careless"
    accepts = Agree.accepts
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Rejected tokens get a second chance, so they come too often."""
        return Verdict(Agree()(draft, p).stop, lambda rows: p[torch.from_numpy(rows).to(p.device)])
