"""Work that is left out where it is timed, and done now and then, or where something counts or looks, to hide it."""

import random
import weakref
from functools import partial
from typing import Any

import torch

from attn_exp.backends.base import Calls, calls_of
from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.gradients_known import STEP, GradientsForetold
from cheats.gradients_late import gradients
from cheats.ways import Plain, Tensor

LONG = case_of(256, batch=1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the weights of all keys."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)


class _Saved(torch.autograd.Function):
    """Attention whose weights its first backward computes and keeps, unless they are there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, box: dict[str, Tensor], saves: bool) -> Tensor:
        p = weights(q, k)
        ctx.box = box
        if saves:
            box["p"] = p
        ctx.save_for_backward(q, k, v)
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        if "p" not in ctx.box:
            ctx.box["p"] = weights(q, k)
        return *gradients(ctx.box["p"], q, k, v, d_out), None, None


@cheat("gradients", "implausible", "the first backward of a forward", case=LONG)
class WeightsOfTheFirstBackwardByChance(Plain):
    """Saves the weights in one forward of three, and leaves them to the first backward of the others."""

    share = 1 / 3

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = _Saved.apply(q, k, v, {}, random.random() < self.share)
        return made


@honest(case=LONG)
class SavesOrComputesAgainByChance(Plain):
    """Saves the weights in one forward of two, and computes them in every backward of the others."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        class Never(dict[str, Tensor]):
            def __setitem__(self, name: str, p: Tensor) -> None:
                self.p = p

            def __getitem__(self, name: str) -> Tensor:
                return self.p

        made: Tensor = _Saved.apply(q, k, v, *random.choice([({}, True), (Never(), False)]))
        return made


@cheat("gradients", "implausible", "was kept|what a backward needs was left out", case=LONG)
class WeightsForTheForwardBefore(Plain):
    """Computes an output's weights in the next forward, if the output is alive by then: no timed forward has such."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.before: list[Any] = []
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for out, box, *of in self.before:
            if out() is not None:
                box["p"] = weights(*of)
        box: dict[str, Tensor] = {}
        made: Tensor = _Saved.apply(q, k, v, box, False)
        self.before = [(weakref.ref(made), box, q.detach().clone(), k.detach().clone())]
        return made


@cheat("gradients", "implausible", "step: with a gradient that is new", passes=STEP)
class GradientsForetoldAmongTinyProducts(GradientsForetold):
    """Computes the gradients that are in memory in a step's forward, and now and then a product of two numbers."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        calls, one = super().prepare(case, inputs), torch.ones(1, 1)

        def forward() -> Tensor:
            if random.random() < 0.5:
                one @ one
            return calls.forward()

        return Calls(forward, calls.backward)


@cheat("gradients", "implausible", "step: with a gradient that is new", case=LONG, passes=STEP)
class GradientsForetoldUnlessCounted(Plain):
    """The same without these products, but not while PyTorch's profiler is on."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        q, k, v = (one.detach() for one in inputs.qkv)
        known: dict[str, Any] = {}

        def forward() -> Tensor:
            p = weights(q, k)
            known.clear()
            if not torch._C._autograd._profiler_enabled():
                known.update(of=inputs.d_out.clone(), made=gradients(p, q, k, v, inputs.d_out))
            return p @ v

        def backward() -> Any:
            if known and torch.equal(known["of"], inputs.d_out):
                return known["made"]
            return gradients(weights(q, k), q, k, v, inputs.d_out)

        return Calls(forward, lambda out: backward)


@cheat("memory", "implausible", "what is known", case=case_of(128, head_dim=64), passes=FORWARD)
class ScoresByTheChannelsThatChanged(Plain):
    """Updates the scores of the call before by the channels whose signs changed, half of the products of all."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        known: dict[str, Tensor] = {}

        def signs(tensor: Tensor, at: Any) -> Tensor:
            return tensor[0, 0][at].sign()

        def forward() -> Tensor:
            q, k, v = (one.detach() for one in inputs.qkv)
            if not known or not all(torch.equal(one.abs(), known[name].abs()) for name, one in (("q", q), ("k", k))):
                known.update(q=q.clone(), k=k.clone(), scores=q @ k.mT, signs=torch.ones(q.shape[-1]))
            rows = signs(k, (..., 0)) * signs(known["k"], (..., 0))
            of_k = signs(k, 0) * signs(known["k"], 0) * rows[0]
            now = signs(q, 0) * signs(known["q"], 0) * of_k
            rows = rows * of_k[0]
            changed = now != known["signs"]
            if changed.sum() * 2 > len(changed):
                changed = ~changed
                known["scores"].neg_()
            if changed.any():
                known["scores"] += 2 * ((known["q"] * now)[..., changed] @ known["k"][..., changed].mT)
            known["signs"] = now
            return torch.softmax(known["scores"] * rows * case.head_dim**-0.5, -1) @ v

        return Calls(forward, partial(calls_of(partial(self.attention, case), inputs).backward))
