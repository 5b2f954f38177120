"""CUDA sources, compiled at run time by NVRTC (see :mod:`trt_cpspec.nvrtc`).

They include nothing, because NVRTC's wheel ships no headers: ``common.cuh`` is put in front of each ``.cu`` file.
"""
