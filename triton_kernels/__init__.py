"""Triton kernels of the draft step. Each file holds a kernel, its launcher and its torch twin.

These files import only numpy, torch and triton, and fall back to the twin where triton has no device to run on.
The folder is installed as `vllm_dflash.triton_kernels`; see pyproject.toml for why not as `triton_kernels`.
"""

if __name__ == "triton_kernels":
    # Python started in the repository root finds this folder under the name of OpenAI's package, which vLLM needs
    # for MXFP4 models. Hand over to an installed one; otherwise fail, and vLLM takes its vendored copy.
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _here = Path(__file__).resolve().parent.parent
    _installed = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != _here])
    if _installed is None or _installed.loader is None:
        raise ImportError("this folder is vllm_dflash.triton_kernels; import it by that name")
    sys.modules[__name__] = importlib.util.module_from_spec(_installed)
    _installed.loader.exec_module(sys.modules[__name__])
