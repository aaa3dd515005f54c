"""Results of another kind than a tensor of the case's shape, dtype and device."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run

FORM = r"\bout\b"


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class Nothing(Plain):
    """Returns None."""

    def forward(self, run: Run) -> Any:
        return None


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ATuple(Plain):
    """Returns the output and the log-sum-exp."""

    def forward(self, run: Run) -> Any:
        return run(), torch.zeros(1)


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ANumpyArray(Plain):
    """Returns a NumPy array."""

    def forward(self, run: Run) -> Any:
        return run().numpy()


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class OnMeta(Plain):
    """Returns a tensor on the device meta, which has no numbers."""

    def forward(self, run: Run) -> Any:
        return torch.empty_like(self.inputs.d_out, device="meta")


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class MetaAfterTheFirst(Plain):
    """Returns tensors on the device meta after its first call."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        return run() if self.calls == 1 else torch.empty_like(self.inputs.d_out, device="meta")


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ASparseTensor(Plain):
    """Returns a sparse tensor with the right numbers."""

    def forward(self, run: Run) -> Any:
        return run().to_sparse()


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class AnExpandedTensor(Plain):
    """Returns the output of the first query for all of them, expanded with a stride of zero."""

    def forward(self, run: Run) -> Any:
        return run()[:, :, :1].expand(-1, -1, self.case.q_len, -1)


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ANegatedView(Plain):
    """Returns a view whose sign is not computed yet, so that each reader pays for it."""

    def forward(self, run: Run) -> Any:
        return torch._neg_view(-run())


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, case=case_of(dtype="bfloat16"))
class AWiderDtype(Plain):
    """Returns float32 for bf16, which looks more accurate than it may be."""

    def forward(self, run: Run) -> Any:
        return run().float()


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, case=case_of(dtype="bfloat16"))
class AnotherDtype(Plain):
    """Returns float16 for bf16."""

    def forward(self, run: Run) -> Any:
        return run().half()


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ComplexNumbers(Plain):
    """Returns the output as complex numbers."""

    def forward(self, run: Run) -> Any:
        return run().to(torch.complex64)


@cheat("laziness", ("inaccurate", "error"), r"shape", passes=FORWARD)
class AFlatTensor(Plain):
    """Returns the output without its last dimension apart: (batch, heads, length * dim)."""

    def forward(self, run: Run) -> Any:
        return run().flatten(2)


@cheat("laziness", ("inaccurate", "error"), r"shape", passes=FORWARD)
class TheFirstRowOfTheBatch(Plain):
    """Returns one row of the batch, which would broadcast against the reference."""

    def forward(self, run: Run) -> Any:
        return run()[:1]


@cheat("laziness", "inaccurate", r"\bout\b|input", passes=FORWARD)
class IntoItsInput(Plain):
    """Writes the output over q and returns q."""

    def forward(self, run: Run) -> Any:
        q = self.inputs.q_bhsd
        return q.data.copy_(run())


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class TheInput(Plain):
    """Returns v, which is near the output of sharp scores."""

    def forward(self, run: Run) -> Any:
        return self.inputs.v_bhsd
