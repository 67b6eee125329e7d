"""DFlash speculative decoding for vLLM.

Importing this package imports neither vLLM nor torch: vLLM loads plugins in every process it starts.
"""

__all__ = ["LOGGER", "SUPPORTED_VLLM", "__version__"]

__version__ = "0.1.0"

#: Name of our logger; below "vllm", so that vLLM's logging settings hold for it.
LOGGER = "vllm.plugins.dflash"

#: vLLM releases whose internals this version is written and tested for: at least the first, below the second.
SUPPORTED_VLLM = ("0.32", "0.34")
