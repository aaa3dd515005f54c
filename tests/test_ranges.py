import pytest
import torch

from attn_exp.worker.attempt import marked


def test_a_range_is_pushed_and_popped_on_a_gpu_alone_also_if_what_is_inside_raises(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with marked("job", "a", "cpu"):
        pass
    assert seen == []
    with pytest.raises(RuntimeError), marked("job", "a", "cuda"), marked("phase", "timing", "cuda"):
        raise RuntimeError
    assert seen == ["job:a", "phase:timing", "pop", "pop"]
