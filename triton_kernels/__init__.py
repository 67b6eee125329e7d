"""Triton kernels of the draft step. Each file holds a kernel, its launcher and its torch twin.

These files import only torch and triton, and fall back to the twin where triton has no device to run on.
The folder is installed as `vllm_dflash.triton_kernels`; see pyproject.toml for why not as `triton_kernels`.
"""
