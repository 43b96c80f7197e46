"""`llama_cpp.server`: not provided; its import is an error with the reason."""

from penstock.compat.llama_cpp.missing import not_provided

raise not_provided("server")
