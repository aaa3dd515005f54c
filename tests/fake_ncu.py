#!/usr/bin/env python3
"""Stands in for Nsight Compute: says what it is told to in FAKE_NCU, and keeps its arguments beside the report."""

import itertools
import json
import os
import sys
from pathlib import Path

LISTING = """Device NVIDIA H200 (GH100)
-------------------------------------------- ---------- ----------- ------------------------
Metric Name                                  Metric Type Metric Unit Metric Description
-------------------------------------------- ---------- ----------- ------------------------
dram__bytes_read                             Counter    byte        # of bytes read from DRAM
dram__bytes_write                            Counter    byte        # of bytes written to DRAM
gpu__time_duration                           Counter    nsecond     total duration in nanoseconds
sm__throughput                               Throughput %           SM throughput
smsp__average_warps_issue_stalled_gmma_per_issue_active Ratio inst  stalled on gmma
smsp__average_warps_issue_stalled_wait_per_issue_active Ratio inst  stalled on wait
"""
ERRORS = {
    "permission": (
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n"
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on "
        "the target device 0. For instructions on enabling permissions and to get more information see "
        "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
    ),
    "busy": (
        "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) "
        "is concurrently collecting profiling data.\n"
    ),
    "lock": "==ERROR== InterprocessLockFailed: could not open /tmp/nsight-compute-lock\n",
    "driver": "==ERROR== The installed CUDA driver is not compatible with Nsight Compute.\n",
    "virtual": "==ERROR== Profiling is not supported on device 0 as it is a vGPU.\n",
    "target": "RuntimeError: out\n==ERROR== The application returned an error code (1).\n",
    "silent": "",
}
arguments, told = sys.argv[1:], os.environ.get("FAKE_NCU", "ok")
after = dict(itertools.pairwise(arguments))
if "--query-metrics" in arguments:
    print(LISTING)
elif "--import" in arguments:
    assert Path(after["--import"]).exists()
    print(Path(os.environ["FAKE_NCU_CSV"]).read_text())
elif told in ERRORS:
    print(ERRORS[told])
    raise SystemExit(1)
else:
    report = Path(after["--export"])
    request = (Path(after["--once"]) / "request.yaml").read_text()
    seen = {"arguments": arguments, "request": request}
    Path(os.environ["FAKE_NCU_CSV"]).with_name("seen.json").write_text(json.dumps(seen))
    print("==PROF== Disconnected from process 4711")
    if told != "no kernels":
        report.write_bytes(b"NVR")
    else:
        print("==WARNING== No kernels were profiled.")
