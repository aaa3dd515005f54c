"""Check whether a result misses keys at the boundary of a mask, includes keys beyond it, or scales scores wrongly.

Among thousands of keys, one key weighs less than 16-bit rounding, so norms of errors cannot show it. But it moves an
output in a known direction, v_j - out_i, while rounding spreads over all `value_dim` directions. The error is projected
onto that direction for a sample of rows, in float64. The same is done for dq, and for the output's derivative by the
scores' scale. Rows and heads are drawn from the operating system's entropy, beside those where kernels err.

Keys anywhere that a result leaves out, or counts twice, as at the seam of two tiles, are found in the same way. A key
moves an output by its weight times v_j - out_i, over all rows and heads together.
"""

from dataclasses import dataclass

import torch

from attn_exp.attention.formula import scored_with_slope, seen_keys
from attn_exp.attention.inputs import Inputs, unit_of
from attn_exp.attention.sampling import Places, boundary_rows, fresh_dice
from attn_exp.attention.scores import added_scores, log_sum, sinks_at
from attn_exp.core.case.case import DTYPE_BYTES, Case

# Scores of one head's sampled rows, and boundary keys of all heads: limits of float64 memory and of time.
_SCORES = {"cuda": 1 << 21, "cpu": 1 << 16}
_KEYS = {"cuda": 1 << 20, "cpu": 1 << 17}
_MOST_ROWS = {"cuda": 256, "cpu": 96}
_MOST_HEADS = {"cuda": 8, "cpu": 4}
# Beside the boundary rows, this many at random at least.
_RANDOM_ROWS = 12
# If few keys have the weight, rounding their weights moves the output along few directions, among them these.
LEAST_KEYS = 16.0
# A deviation follows a key if it is within this share of the key's movement, with so many standard errors.
_SHARE, _ERRORS_OF_KEY = 0.5, 10.0
# With fewer standard errors nothing is a candidate: among a million keys the largest of a normal distribution has five.
_CANDIDATE = 4.5
# With fewer directions of all rows the noise is too uncertain.
_LEAST_DIRECTIONS = 128
# Several wrong keys hide each other: each one found is taken out of the error before the next is looked for.
_MOST = 8
# A key with nearly all the weight: its loss shows in the norms.
_HEAVIEST = 0.9
# The same of keys at the boundary of a mask.
_ERRORS = 8.0
# With fewer directions the rounding of a single row is too uncertain to judge it.
_LEAST_DIM = 32
# One key, and blocks of keys. The nearest size still shows most of a block of another size.
_COUNTS = (1, 4, 16, 64)
# Units of the dtype by which the scores' scale may be off beside its noise.
_LEAST_NOISE = 0.1
_SCALE_UNITS, _SCALE_UNITS_OF_CODES = 0.05, 0.2
# If a softcap's tanh is rounded to 16 bits, a small score passes it unchanged, as if scores were scaled by 0.05 to 0.11
# % in bf16: eager mode on an H200 at softcap=50. On hard values the softcap itself shows.
_SCALE_UNITS_OF_TANH = 0.25
# Nobody holds the scale in more than float32, and SDPA's formula multiplies q and k by its root. In float32, 42 of 150
# cases with head dimensions of 6 to 128 were off by a few roundoffs, which is more than their noise.
_SCALE_ROUNDING = 1e-5


@dataclass(frozen=True)
class Gradient:
    """The backward at the sampled rows: dq, and what each key adds to it, `d_scores` x `keys` (heads, kv_len, dim).

    `d_scores` (heads, rows, kv_len) of hidden keys are those that they would have if they were visible.
    """

    dq: torch.Tensor
    d_scores: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class EdgeSample:
    """Sampled rows of some heads.

    Attributes:
        places: the heads and the queries.
        first: the first key that each query sees, on the CPU.
        last: the last one, on the CPU.
        weights: (heads, rows, kv_len); hidden keys have the weights that they would have among the visible ones.
        visible: the same with zeros for hidden keys.
        values: (heads, kv_len, value_dim).
        out: (heads, rows, value_dim).
        by_scale: the derivative of `out` with respect to the logarithm of the scores' scale.
        spread: the number of keys with the weight, 1 / sum(p^2); 0 for a query that sees no key. (heads, rows).
        gradient: the backward, None if it is not asked for.
    """

    places: Places
    first: torch.Tensor
    last: torch.Tensor
    weights: torch.Tensor
    visible: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    by_scale: torch.Tensor
    spread: torch.Tensor
    gradient: Gradient | None

    def error(self, out_bhsd: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the error of a backend's output at the sampled rows."""
        return _rows_of(self.places, out_bhsd) * scale - self.out

    def dq_error(self, dq_bhsd: torch.Tensor) -> torch.Tensor:
        """Return the error of a backend's dq at the sampled rows."""
        assert self.gradient is not None
        return _rows_of(self.places, dq_bhsd) - self.gradient.dq


def edge_sample(case: Case, inputs: Inputs, *, with_gradients: bool) -> EdgeSample:
    """Draw rows and heads, and compute them."""
    inputs = inputs.numbers()
    device = inputs.q_bhsd.device
    dice = fresh_dice()
    most = max(1, min(_MOST_HEADS[device.type], _KEYS[device.type] // case.kv_len))
    heads = torch.randperm(case.batch * case.q_heads, generator=dice)[:most]
    chosen = _rows(case, device.type, dice)
    first, last = seen_keys(case, chosen)
    rows = chosen.to(device)
    batch, q_head = (heads // case.q_heads).to(device), (heads % case.q_heads).to(device)
    kv_head = q_head // (case.q_heads // case.kv_heads)
    places = Places(heads.to(device), rows.expand(len(heads), -1), case.q_heads)
    q = _rows_of(places, inputs.q_bhsd)
    k, v = inputs.k_bhsd[batch, kv_head].double(), inputs.v_bhsd[batch, kv_head].double()
    scores = q @ k.mT * case.head_dim**-0.5
    # The derivatives of the capped scores with respect to scores and to the logarithm of their scale.
    uncapped = scores
    scores, slope = scored_with_slope(case, scores)
    by_scale = uncapped if slope is None else uncapped * slope
    key = torch.arange(case.kv_len)
    added = added_scores(case, q_head, rows, key.to(device), scores.dtype)
    scores = scores if added is None else scores + added
    hidden = ((key < first[:, None]) | (key > last[:, None])).to(device)
    seen = scores.masked_fill(hidden, -torch.inf)
    sinks = sinks_at(case, q_head)
    weights = (scores - log_sum(seen, None if sinks is None else sinks[:, None, None])).exp()
    visible = weights.masked_fill(hidden, 0.0)
    out = visible @ v
    spread = (1 / visible.square().sum(-1)).masked_fill((first > last).to(device), 0.0)
    mean = (visible * by_scale).sum(-1, keepdim=True)
    gradient = None
    if with_gradients:
        d_out = _rows_of(places, inputs.d_out_bhsd)
        d_scores = weights * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * case.head_dim**-0.5
        d_scores = d_scores if slope is None else d_scores * slope
        gradient = Gradient(d_scores.masked_fill(hidden, 0.0) @ k, d_scores, k)
    moved = (visible * (by_scale - mean)) @ v
    return EdgeSample(places, first, last, weights, visible, v, out, moved, spread, gradient)


def _rows(case: Case, device: str, dice: torch.Generator) -> torch.Tensor:
    """Return the rows at boundaries and others at random, ascending."""
    always = torch.tensor(boundary_rows(case.q_len))
    count = min(case.q_len, _MOST_ROWS[device], max(len(always) + _RANDOM_ROWS, _SCORES[device] // case.kv_len))
    order = torch.randperm(case.q_len, generator=dice)
    others = order[~torch.isin(order, always)][: count - len(always)]
    return torch.cat([always, others]).sort().values


def _rows_of(places: Places, tensor: torch.Tensor) -> torch.Tensor:
    return places.of(tensor)[0].double()


@torch.no_grad()
def wrong_key(sample: EdgeSample, error: torch.Tensor) -> str | None:
    """Return which key is missing or counted twice by the error of the sampled rows as a sentence, or None."""
    judged = sample.spread >= LEAST_KEYS
    weights = sample.visible * judged.unsqueeze(-1)
    values, out, dim = sample.values, sample.out, error.shape[-1]
    lengths = values.square().sum(-1).unsqueeze(1) - 2 * out @ values.mT + out.square().sum(-1, keepdim=True)
    size = weights.square() * lengths.clamp(min=0)
    known, rows = size.sum((0, 1)), judged.sum()
    tiny = torch.finfo(known.dtype).tiny
    found: dict[int, float] = {}
    while True:
        along = (weights * (error @ values.mT - (error * out).sum(-1, keepdim=True))).sum((0, 1))
        noise = (size * (error.square().sum(-1, keepdim=True) / dim)).sum((0, 1)).sqrt().clamp(min=tiny)
        share = along / known.clamp(min=tiny)
        errors = (along.abs() / noise).where((share.abs() - 1).abs() < _SHARE, 0.0)
        best = errors.argmax()
        most, of, directions = torch.stack([errors[best], share[best], rows * dim]).tolist()
        key = int(best)
        if most < _CANDIDATE or directions < _LEAST_DIRECTIONS or len(found) == _MOST or key in found:
            break
        found[key] = of
        move = weights[..., key, None] * (values[:, key].unsqueeze(1) - out)
        error = error - move if of > 0 else error + move
    keys = list(found)
    # By the noise that is left without all of them.
    clear = (known[keys] / noise[keys] > _ERRORS_OF_KEY).tolist() if keys else []
    sure = [key for key, one in zip(keys, clear, strict=True) if one]
    if not sure:
        return None
    what = "were missing" if found[sure[0]] < 0 else "were counted twice"
    several = f"keys {', '.join(map(str, sorted(sure)))}" if len(sure) > 1 else f"key {sure[0]}"
    return (
        f"out is as if {several} {what}: the sampled rows deviate by {abs(found[sure[0]]):.2f} of what that would cause"
    )


@dataclass(frozen=True)
class _Moves:
    """Effects of possible errors: the movement of each row (heads, rows, n, dim), and the rows that each concerns."""

    what: list[str]
    moves: torch.Tensor
    concerned: torch.Tensor


@torch.no_grad()
def edge_error(
    case: Case, inputs: Inputs, out_bhsd: torch.Tensor, scale: float = 1.0, dq_bhsd: torch.Tensor | None = None
) -> str | None:
    """Return what is wrong at the boundary of the mask, or with the scores' scale, as a sentence, or None.

    `scale` is the factor of an output in codes. At fp8 dq is not checked, since codes of its scores' gradients lose
    small weights.
    """
    sample = edge_sample(case, inputs, with_gradients=dq_bhsd is not None and not case.quantised)
    blocks = _blocks(sample)
    if not blocks:
        return None
    error = sample.error(out_bhsd, scale)
    wrong = _wrong("out", sample, error, _moves_of_out(sample, blocks))
    wrong = wrong or wrong_key(sample, error) or _wrong_scale(case, sample, error)
    if wrong is None and sample.gradient is not None and dq_bhsd is not None:
        wrong = _wrong("dq", sample, sample.dq_error(dq_bhsd), _moves_of_dq(sample, sample.gradient, blocks))
    return wrong


@dataclass(frozen=True)
class _Block:
    """The keys (rows, n) from the boundary on, which of them exist, and if a query sees them; on the CPU."""

    what: str
    keys: torch.Tensor
    exist: torch.Tensor
    seen: bool


def _blocks(sample: EdgeSample) -> list[_Block]:
    """Return what could be wrong."""
    step, keys = torch.arange(max(_COUNTS)), sample.weights.shape[-1]
    first, last = sample.first[:, None], sample.last[:, None]
    after, before = last + 1 + step, first - 1 - step
    blocks = (
        _Block("the last {} that a query sees were missing", last - step, last - step >= first, seen=True),
        _Block("the first {} that a query sees were missing", first + step, first + step <= last, seen=True),
        _Block("the {} after the last that a query sees were visible", after, after < keys, seen=False),
        _Block("the {} before the first that a query sees were visible", before, before >= 0, seen=False),
    )
    return [block for block in blocks if block.exist.any()]


def _sums(
    sample: EdgeSample, blocks: list[_Block], per_key: torch.Tensor, of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight (heads, rows, n) of so many keys of each block, and the sum of per_key x of over them.

    The direction of a movement is known well enough in float32: `of` is.
    """
    device, count = per_key.device, per_key.shape[-1]
    # (rows, blocks, keys)
    keys, exist = (
        torch.stack(several, 1) for several in zip(*((block.keys, block.exist) for block in blocks), strict=True)
    )
    keys, exist = keys.clamp(0, count - 1), exist.to(device)
    same = bool((keys == keys[:1]).all())
    keys = keys.to(device)
    at = keys.flatten(1).expand(len(of), -1, -1)
    weight, factor = (one.gather(-1, at).unflatten(-1, keys.shape[1:]) * exist for one in (sample.weights, per_key))
    within = torch.arange(max(_COUNTS), device=device) < torch.tensor(_COUNTS, device=device)[:, None]
    factors = factor.to(of.dtype).unsqueeze(-2) * within
    if same:
        by_block = factors.transpose(1, 2)
        total = (by_block.flatten(2, 3) @ of[:, keys[0]]).unflatten(2, by_block.shape[2:4]).transpose(1, 2)
    else:
        total = factors @ of[:, keys]
    return (weight @ within.to(weight.dtype).T).flatten(2), total.flatten(2, 3).double()


def _named(blocks: list[_Block], start: str = "") -> list[str]:
    counted = ["key" if count == 1 else f"{count} keys" for count in _COUNTS]
    return [start + block.what.format(keys) for block in blocks for keys in counted]


def _signs(blocks: list[_Block], like: torch.Tensor) -> torch.Tensor:
    """Return -1 for what is missing and 1 for what is added, (blocks x counts,)."""
    return like.new_tensor([-1.0 if block.seen else 1.0 for block in blocks for _ in _COUNTS])


def _moves_of_out(sample: EdgeSample, blocks: list[_Block]) -> _Moves:
    weight, total = _sums(sample, blocks, sample.weights, sample.values.float())
    # Leaving out keys of weight p moves the output by -p / (1 - p) of (v - out); adding keys of weight w by w / (1
    # + w).
    signs = _signs(blocks, weight)
    share = signs / (1 + signs * weight)
    moves = share[..., None] * (total - weight[..., None] * sample.out.unsqueeze(-2))
    return _Moves(_named(blocks), moves, (weight > 0) & (weight < _HEAVIEST))


def _moves_of_dq(sample: EdgeSample, gradient: Gradient, blocks: list[_Block]) -> _Moves:
    weight, total = _sums(sample, blocks, gradient.d_scores, gradient.keys.float())
    moves = _signs(blocks, total)[:, None] * total
    return _Moves(_named(blocks, "in the backward "), moves, (weight > 0) & (weight < _HEAVIEST))


def _wrong(name: str, sample: EdgeSample, error: torch.Tensor, made: _Moves) -> str | None:
    """Return which movement an error follows as a sentence, or None.

    A row counts if rounding cannot explain it; all examined rows count if rounding cannot explain their sum.
    """
    error, moves = error.unsqueeze(-2), made.moves
    known = moves.square().sum(-1)
    judged = made.concerned & (known > 0) & (sample.spread >= LEAST_KEYS).unsqueeze(-1)
    known = known.where(judged, 1.0)
    along = (error * moves).sum(-1).where(judged, 0.0)
    beside = (error.square().sum(-1) - along.square() / known).clamp(min=0).where(judged, 0.0)
    beside = beside / max(1, moves.shape[-1] - 1)
    own = along / known
    clear = (own > _SHARE) & (own < 2) & (along.square() > _ERRORS**2 * beside * known)
    sums = torch.stack([along, known * judged, known * beside, clear, judged]).sum((1, 2)).T.tolist()
    # A block of keys shows in each of its parts. Report what explains most rows, and nearest to entirely.
    best: tuple[float, float, int, int, int] | None = None
    for index, (moved, of, noise, alone, count) in enumerate(sums):
        if not count:
            continue
        share = moved / of
        if abs(share - 1) < _SHARE and share > _ERRORS * noise**0.5 / of:
            found = (1.0, -abs(share - 1), -index, int(count), int(count))
        elif alone and moves.shape[-1] >= _LEAST_DIM:
            share = float(own[..., index][clear[..., index]].median())
            found = (alone / count, -abs(share - 1), -index, int(alone), int(count))
        else:
            continue
        if best is None or found > best:
            best, deviation = found, share
    if best is None:
        return None
    _, _, index, rows, of_rows = best
    what = made.what[-index]
    return (
        f"{name} is as if {what}: {rows} of {of_rows} sampled rows deviate by {deviation:.2f} of what that would cause"
    )


def _wrong_scale(case: Case, sample: EdgeSample, error: torch.Tensor) -> str | None:
    """Return by how much the scores are scaled wrongly as a sentence, or None."""
    judged = sample.spread >= LEAST_KEYS
    error, move = error[judged], sample.by_scale[judged]
    known = move.square().sum(-1)
    if not known.sum() > 0:
        return None
    # A row counts by the inverse square of its error: where a query sees few keys, its norm and rounding are large.
    square = error.square().sum(-1)
    weight = 1 / (square + _LEAST_NOISE**2 * square.sum() / known.sum() * known).clamp(
        min=torch.finfo(square.dtype).tiny
    )
    along, total = (error * move).sum(-1), (weight * known).sum()
    off = (weight * along).sum() / total
    noise = (weight * (along - off * known)).square().sum().sqrt() / total
    unit = unit_of(case)
    units = _SCALE_UNITS_OF_CODES if case.quantised else _SCALE_UNITS
    if case.softcap is not None and DTYPE_BYTES[case.dtype] == 2:
        units = max(units, _SCALE_UNITS_OF_TANH)
    if len(known) < _LEAST_DIM or off.abs() <= max(units * unit, _SCALE_ROUNDING) + _ERRORS * noise:
        return None
    return f"out is as if scores were scaled by {float(1 + off):.4f} of what is right"
