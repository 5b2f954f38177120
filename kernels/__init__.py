"""CUDA sources, compiled at run time by NVRTC. There are none yet."""
