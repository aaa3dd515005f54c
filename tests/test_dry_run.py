"""What a dry run says of jobs: who refuses, what does not fit, about how long it takes."""

from dataclasses import replace

import msgspec
import pytest
import sweeps

from attn_exp.core.job_question import JobAnswer, JobAnswers, JobQuestion
from attn_exp.core.nvml import GpuInfo
from attn_exp.run import forecast
from attn_exp.run.forecast import Forecast, forecasts, least_bytes, memory_text
from attn_exp.run.predicted import predicted_text, predictions
from attn_exp.worker.job_answers import answers

GPU = GpuInfo(0, "NVIDIA H200", "GPU-1", 141 << 30)


def request(backend="flash", **changes):
    measuring = changes.pop("measuring", {})
    return sweeps.job(backend, of=sweeps.case(**changes.pop("case", {})), measuring=measuring, **changes).request


def told(monkeypatch, *answered, rate=1e12):
    """Let the backends answer this; return the questions that they were asked."""
    asked = []

    def answer_of(module, question):
        asked.extend(msgspec.json.decode(msgspec.json.encode(question), type=list[JobQuestion]))
        return msgspec.json.encode(JobAnswers(jobs=answered, cpu_flops_per_s=rate))

    monkeypatch.setattr(forecast, "answer_of", answer_of)
    return asked


def test_the_least_memory_is_that_of_the_tensors_and_of_scores_that_are_held():
    # batch 4, 16 heads of 128, 1,024 tokens, bf16: each of q, k, v, out and their gradients has 16 MiB.
    assert least_bytes(request(), holds_scores=False) == 8 * (16 << 20)
    assert least_bytes(request(bwd_us=None), holds_scores=False) == 4 * (16 << 20)
    scores = 4 * 16 * 1024 * 1024 * 2
    assert least_bytes(request(), holds_scores=True) == 8 * (16 << 20) + 2 * scores


def test_what_does_not_fit_is_too_large_and_says_why(monkeypatch):
    long = request("math", case={"seq_len": 100_000})
    told(monkeypatch, JobAnswer(holds_scores=True), JobAnswer())
    large, fits = forecasts([long, request(case={"seq_len": 100_000})], [GPU])
    assert (large.what, fits.what, fits.why) == ("too large", "would run", "")
    assert large.why == ("it needs 2,396 GiB or more (all scores are held in memory), and NVIDIA H200 has 141 GiB")
    # A GPU whose memory is unknown takes anything.
    told(monkeypatch, JobAnswer(holds_scores=True))
    assert forecasts([long], [replace(GPU, memory_bytes=0)])[0].what == "would run"


def test_a_host_s_own_memory_counts_on_a_cpu(monkeypatch):
    told(monkeypatch, JobAnswer())
    monkeypatch.setattr(forecast, "installed_bytes", lambda: 1 << 20)
    (found,) = forecasts([request(device="cpu")], [GPU])
    assert found.why == "it needs 128 MiB or more, and this host has 1 MiB"


def test_who_refuses_is_unsupported_and_what_is_missing_unavailable(monkeypatch):
    asked = told(monkeypatch, JobAnswer(refusal="flash has no softcap"), JobAnswer(missing="pip install it"))
    found = forecasts([request(), request("cudnn", device="cpu")], [GPU])
    assert [(one.what, one.why) for one in found] == [
        ("unsupported", "flash has no softcap"),
        ("unavailable", "pip install it"),
    ]
    assert [(one.backend["name"], one.device) for one in asked] == [("flash", "cuda"), ("cudnn", "cpu")]


def test_time_grows_with_the_work_and_the_passes_and_is_unknown_on_an_unknown_device(monkeypatch):
    jobs = [request(bwd_us=None), request(), request(case={"seq_len": 65536})]
    told(monkeypatch, *[JobAnswer()] * 3)
    forward, both, long = (one.seconds for one in forecasts(jobs, [GPU]))
    assert forward < both < long / 2
    told(monkeypatch, JobAnswer())
    assert forecasts(jobs[:1], [replace(GPU, name="something else")])[0].seconds is None
    assert Forecast(what="would run", why="", seconds=None, bytes=5 << 20).size() == "5 MiB or more"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1,000 B"), (1536, "1.5 KiB"), (128 << 20, "128 MiB"), (2396 << 30, "2,396 GiB")],
)
def test_memory_is_written_in_three_digits(count, text):
    assert memory_text(count) == text


def test_backends_answer_by_themselves_and_one_that_cannot_be_loaded_hides_no_other():
    target = "attn_exp.backends.{}"
    configs = [
        {"_target_": target.format("eager.Eager"), "name": "eager"},
        {"_target_": target.format("sdpa.Cudnn"), "name": "cudnn"},
        {"_target_": target.format("eager.Missing"), "name": "missing"},
    ]
    asked = tuple(JobQuestion(backend=one, case=sweeps.CASE, device="cpu") for one in configs)
    found = answers(asked)
    eager, cudnn, missing = found.jobs
    assert eager == JobAnswer(holds_scores=True)
    assert cudnn.refusal is not None and "runs only on NVIDIA GPUs" in cudnn.refusal
    assert missing.missing is not None and "Missing" in missing.missing
    assert found.cpu_flops_per_s is not None and found.cpu_flops_per_s > 1e6
    # Nobody is asked about a CPU: nothing is multiplied.
    assert answers((replace(asked[0], device="cuda"),)).cpu_flops_per_s is None


def test_records_of_the_backend_on_this_gpu_predict_the_times_of_its_passes(tmp_path):
    def time_us(length, slope):
        return 10 + slope * (length / 1024) ** 2

    lengths = (512, 1024, 2048, 4096, 8192)
    made = [
        sweeps.job(of=sweeps.case(seq_len=length), fwd_us=time_us(length, 100), bwd_us=time_us(length, 250))
        for length in lengths
    ]
    other = [replace(one, environment=sweeps.H200 | {"gpu": "NVIDIA H100"}) for one in made]
    sweeps.write(
        tmp_path / "first", [*made, *(sweeps.job("cudnn", of=sweeps.case(seq_len=one)) for one in lengths[:3])]
    )
    sweeps.write(tmp_path / "of_another_gpu", other)
    jobs = [request(case={"seq_len": 3000}), request(case={"seq_len": 65536}), request("cudnn"), request("math")]
    found = predictions(jobs, tmp_path, [GPU])
    near = found[jobs[0].job]
    for side, slope in (("forward", 100), ("backward", 250)):
        assert near[side].low_us < time_us(3000, slope) < near[side].high_us
        assert near[side].time_us == pytest.approx(time_us(3000, slope), rel=0.1)
    assert predicted_text(near).startswith("forward ") and "beyond" not in predicted_text(near)
    assert "beyond what was measured (q_len 65536 (measured up to 8192)" in predicted_text(found[jobs[1].job])
    block = request(case={"seq_len": 3000, "workload": "decoder_layer", "mlp_dim": 4096, "layout": "bhsd"})
    assert predictions([block], tmp_path, [GPU]) == {block.job: {}}
    # Three cases are too few, and none is less.
    assert found[jobs[2].job] == found[jobs[3].job] == {} and predicted_text({}) == ""
    assert predictions(jobs, tmp_path, [replace(GPU, name="NVIDIA B200")])[jobs[0].job] == {}
    assert predictions(jobs[:1], tmp_path / "none", [GPU]) == {jobs[0].job: {}}
