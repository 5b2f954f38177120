"""CUDA sources, compiled at run time by NVRTC (see :mod:`trt_cpspec.nvrtc`).

``common.cuh`` is put in front of each ``.cu`` file, because NVRTC's wheel ships no headers: the sources include nothing.
"""
