"""llama-cpp-python's high-level API on Penstock: `from penstock.compat.llama_cpp import Llama`."""

from typing import NoReturn

from penstock.compat.errors import UnsupportedError
from penstock.compat.llama_cpp import llama_grammar, llama_speculative
from penstock.compat.llama_cpp.constants import (
    LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
)
from penstock.compat.llama_cpp.llama import Llama
from penstock.compat.llama_cpp.llama_grammar import LlamaGrammar
from penstock.compat.llama_cpp.missing import NOT_PROVIDED, not_provided
from penstock.compat.llama_cpp.processors import (
    LogitsProcessor,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

__all__ = [
    "LLAMA_DEFAULT_SEED",
    "LLAMA_POOLING_TYPE_LAST",
    "LLAMA_POOLING_TYPE_MEAN",
    "LLAMA_POOLING_TYPE_NONE",
    "LLAMA_POOLING_TYPE_UNSPECIFIED",
    "Llama",
    "LlamaGrammar",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "UnsupportedError",
    "__version__",
    "llama_grammar",
    "llama_speculative",
]

#: The version of llama-cpp-python's API that this is.
__version__ = "0.3.36"


def __getattr__(name: str) -> NoReturn:
    if name in NOT_PROVIDED:
        raise not_provided(name)
    reason = "; llama.cpp's C functions are not provided" if name.startswith(("llama_", "ggml_")) else ""
    message = f"module {__name__!r} has no attribute {name!r}{reason}"
    raise AttributeError(message, name=name)
