import pytest

from attn_exp.core.host.hardware import datasheet_peak


@pytest.mark.parametrize(
    ("device", "name", "half_tflops", "tb_per_s"),
    [
        ("NVIDIA B200", "B200", 2250, 8.0),
        ("NVIDIA GH200 480GB", "GH200", 989.4, 4.0),
        ("NVIDIA H200", "H200 SXM", 989.4, 4.8),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4, 3.35),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5, 3.9),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756, 2.0),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312, 2.039),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312, 1.555),
        ("NVIDIA L40S", "L40S", 362, 0.864),
    ],
)
def test_names_that_drivers_report_find_their_datasheet(device, name, half_tflops, tb_per_s):
    peak = datasheet_peak(device)
    assert peak.name == name
    assert peak.flops["bfloat16"] == peak.flops["float16"] == pytest.approx(half_tflops * 1e12)
    assert peak.bytes_per_s == pytest.approx(tb_per_s * 1e12)
    assert peak.source
    # Matrix units take codes at twice the rate of half precision, from Ada and Hopper on.
    fp8 = peak.flops.get("float8_e4m3fn")
    assert (fp8 is None) if "A100" in name else fp8 == pytest.approx(2 * half_tflops * 1e12, rel=0.02)


@pytest.mark.parametrize(
    "device",
    ["", "NVIDIA GeForce RTX 4090", "NVIDIA L40", "Tesla V100-SXM2-16GB", "NVIDIA GB200", "AMD Instinct MI300X"],
)
def test_a_chip_that_is_not_in_the_table_has_no_peak_rather_than_anothers(device):
    assert datasheet_peak(device) is None
