"""`llama_cpp.llama_chat_format`: not provided; its import is an error with the reason."""

from penstock.compat.llama_cpp.missing import not_provided

raise not_provided("llama_chat_format")
