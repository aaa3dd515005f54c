"""Outputs of which a part was never computed."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, hidden

OUT = r"\bout\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class HalfTheBatch(Plain):
    """Computes half of the batch and leaves the rest as it was."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = case.batch // 2
        return torch.cat([attend(case, q[:half], k[:half], v[:half]), torch.zeros_like(q[half:])])


class _LeftOver(Plain):
    """Computes everything in its first call, and later only what `part` gives."""

    buffer: Tensor | None = None

    def part(self, out: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, run: Run) -> Tensor:
        if self.buffer is None:
            self.buffer = run().clone()
        else:
            self.part(self.buffer).copy_(self.part(run()))
        return self.buffer


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class HalfTheBatchLater(_LeftOver):
    """Computes one row of the batch, and leaves the others from the first call."""

    def part(self, out: Tensor) -> Tensor:
        return out[:1]


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class OneHeadLater(_LeftOver):
    """Leaves one head of all from the first call."""

    def part(self, out: Tensor) -> Tensor:
        return out[:, :-1]


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(200))
class TailTileLater(_LeftOver):
    """Leaves the rows of the last, incomplete tile from the first call."""

    def part(self, out: Tensor) -> Tensor:
        return out[:, :, :192]


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=HALF)
class LastRowLater(_LeftOver):
    """Leaves the last row of every head from the first call."""

    def part(self, out: Tensor) -> Tensor:
        return out[:, :, :-1]


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=HALF)
class LastRowsZero(Plain):
    """Never writes the last 8 rows."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[:, :, -8:] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(200))
class TailTileZero(Plain):
    """Never writes the last, incomplete tile."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[:, :, 192:] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1))
class OneTileOfOneHead(Plain):
    """Leaves out one tile of 64 rows in one head."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[0, 2, 128:192] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1))
class OneRowOfAll(Plain):
    """Leaves out one row of one head in the middle of a tile."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[0, 1, 333] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16"))
class Every200thRow(Plain):
    """Leaves out every 200th row."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[:, :, ::200] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class FirstRowOfBatchForAll(Plain):
    """Computes one row of the batch and returns it for all of them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q[:1], k[:1], v[:1]).expand(case.batch, -1, -1, -1)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class OneHeadForAll(Plain):
    """Computes one head and returns it for all of them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q[:, :1], k[:, :1], v[:, :1]).repeat(1, case.q_heads, 1, 1)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class HalfTheValues(Plain):
    """Computes half of the value dimensions."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = case.value_dim // 2
        out = attend(case, q, k, v[..., :half])
        return torch.cat([out, torch.zeros_like(out)], -1)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class HalfTheDimensions(Plain):
    """Computes scores from three quarters of the dimensions."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = case.head_dim * 3 // 4
        return attend(case, q[..., :kept], k[..., :kept], v)


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_len=512))
class EveryOtherKey(Plain):
    """Uses every other key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k[:, :, ::2], v[:, :, ::2])


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1024, dtype="bfloat16"))
class SomeKeysLeftOut(Plain):
    """Leaves out one key in 128."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(case.q_len, case.kv_len, dtype=torch.bool)
        mask[:, 64::128] = True
        return attend(case, q, k, v, mask=mask)


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1020, dtype="bfloat16"))
class LastKeysLeftOut(Plain):
    """Leaves out the last, incomplete group of 4 keys."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k[:, :, :-4], v[:, :, :-4])


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1024, dtype="bfloat16"))
class OneKeyTwice(Plain):
    """Counts the key at the seam of two tiles twice."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seam = slice(512, 513)
        return attend(case, q, torch.cat([k, k[:, :, seam]], 2), torch.cat([v, v[:, :, seam]], 2))


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class LowRank(Plain):
    """Projects keys onto 24 of 32 directions before it computes scores."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, _, directions = torch.linalg.svd(k, full_matrices=False)
        kept = directions[..., :24, :]
        return attend(case, q @ kept.mT, k @ kept.mT, v)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class TopKeys(Plain):
    """Uses the 64 keys of 128 with the largest scores of each query."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def largest(scores: Tensor) -> Tensor:
            least = scores.topk(64, dim=-1).values[..., -1:]
            return scores.masked_fill(scores < least, -torch.inf)

        return attend(case, q, k, v, scores=largest)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class SmallWeightsDropped(Plain):
    """Sets weights below 0.001 to zero and keeps the sum."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, p=lambda p: p.masked_fill(p < 1e-3, 0.0))


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=HALF)
class LocalWindow(Plain):
    """Uses the last 192 keys of each query, which nobody asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None]
        mask = hidden(case, q.device)
        return attend(case, q, k, v, mask=mask | (key <= row - 192))


@cheat("parts", "inaccurate", OUT, passes=FORWARD, seen=("KernelBench#165", "wafer"))
class Zeros(Plain):
    """Returns zeros, which are near a mean of many values."""

    def forward(self, run: Run) -> Tensor:
        return torch.zeros_like(self.inputs.d_out)


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_len=1024, dtype="bfloat16"))
class MeanOfValues(Plain):
    """Returns the mean of v for every query, as if all weights were equal."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mean(2, keepdim=True).repeat(1, 1, case.q_len, 1)
