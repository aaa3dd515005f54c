"""The part of the corpus that needs a GPU; tests/gpu/test_gpu_cheats.py says how it is run.

No module here imports Triton or touches CUDA before `prepare`, so that `cheats.page` lists the entries on any machine.
The Triton kernels are in tests/cheat_kernels.py.
"""
