"""Keys anywhere that a result leaves out, or counts twice, as at the seam of two tiles or of two parts of the keys.

A key moves an output by its weight times v_j - out_i. The error of the sampled rows is projected onto that movement for
every key, over all rows and heads together.
"""

import torch

from attn_exp.attention.edge_sample import EdgeSample

# If few keys have the weight, rounding their weights moves the output along few directions, among them these.
LEAST_KEYS = 16.0
# A deviation follows a key if it is within this share of the key's movement, with so many standard errors.
_SHARE, _ERRORS = 0.5, 10.0
# With fewer standard errors nothing is a candidate: among a million keys the largest of a normal distribution has five.
_CANDIDATE = 4.5
# With fewer directions of all rows the noise is too uncertain.
_LEAST_DIRECTIONS = 128
# Several wrong keys hide each other: each one found is taken out of the error before the next is looked for.
_MOST = 8


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
    clear = (known[keys] / noise[keys] > _ERRORS).tolist() if keys else []
    sure = [key for key, one in zip(keys, clear, strict=True) if one]
    if not sure:
        return None
    what = "were missing" if found[sure[0]] < 0 else "were counted twice"
    several = f"keys {', '.join(map(str, sorted(sure)))}" if len(sure) > 1 else f"key {sure[0]}"
    return (
        f"out is as if {several} {what}: the sampled rows deviate by {abs(found[sure[0]]):.2f} of what that would cause"
    )
