"""`Llama`: a model with llama-cpp-python's high-level methods."""

from __future__ import annotations

import operator
import os
import random
import threading
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import penstock
from penstock.compat.errors import invalid, refuse
from penstock.compat.llama_cpp import chats, embeddings, hub
from penstock.compat.llama_cpp.arguments import check_others, engine_options, names_of, with_hints
from penstock.compat.llama_cpp.completions import Completion, usage
from penstock.compat.llama_cpp.constants import (
    LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
)
from penstock.compat.llama_cpp.sampling import Sampling
from penstock.compat.prompts import encode_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from penstock.compat.llama_cpp.llama_grammar import LlamaGrammar
    from penstock.compat.llama_cpp.processors import LogitsProcessor, StoppingCriteria

__all__ = ["Llama"]

_ADAPTER = "lora"
_STATE = "the engine keeps the state of each request, and caches prefixes of prompts"
#: Methods and attributes of llama.cpp's context, with the reason why they are refused.
_NOT_PROVIDED = {
    "ctx": _STATE,
    "eval": "use generate, or penstock.Engine.generate with output_logits",
    "eval_logits": "use penstock.Engine.generate with output_logits",
    "eval_tokens": _STATE,
    "load_state": _STATE,
    "model": "llama.cpp's C functions are not provided",
    "sample": "use generate",
    "save_state": _STATE,
    "scores": "use penstock.Engine.generate with output_logits",
}


class Llama:
    """A model. Its methods can be called from any number of threads at the same time.

    The parameters are those of llama-cpp-python, with its defaults; docs/llama_cpp.md lists their effects.
    Values of arguments that are not supported raise `UnsupportedError`, which is a `ValueError`; a model that
    cannot be loaded raises `penstock.ModelLoadError`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        main_gpu: int = 0,
        vocab_only: bool = False,
        seed: int = LLAMA_DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_threads: int | None = None,
        pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED,
        embedding: bool = False,
        lora_path: str | None = None,
        chat_format: str | None = None,
        draft_model: object = None,
        **others: Any,
    ) -> None:
        check_others(others, names_of(Llama))
        embeddings.check_pooling(pooling_type)
        if chat_format is not None and chat_format not in chats.CHAT_FORMATS:
            formats = ", ".join(chats.CHAT_FORMATS)
            refuse("chat_format", chat_format, f"leave it out for the model's template, or use {formats}")
        self.model_path = os.fspath(model_path)
        self.n_batch = n_batch
        self.chat_format = chat_format
        self._seed = _checked(seed or LLAMA_DEFAULT_SEED)
        self._seed_lock = threading.Lock()
        self._embedding = embedding
        self._pooling_type = pooling_type
        self._has_adapter = lora_path is not None
        self._engine: penstock.Engine | None = None
        self._tokenizer = penstock.Tokenizer(self.model_path)
        if vocab_only:
            return
        options = engine_options(
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_gpu_layers=n_gpu_layers,
            main_gpu=main_gpu,
            has_adapter=self._has_adapter,
            draft_model=draft_model,
        )
        self._engine = penstock.Engine(self.model_path, **options)
        self._engine.blocking.start()
        if lora_path is not None:
            try:
                self._engine.blocking.load_adapter(_ADAPTER, lora_path)
            except BaseException:
                self.close()
                raise

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        additional_files: Sequence[str] | None = None,
        local_dir: str | Path | None = None,
        local_dir_use_symlinks: object = "auto",
        cache_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Download a file of a repository on the Hugging Face hub, and open it.

        `filename` and `additional_files` are names, or patterns that each match one file. Raises `ValueError`
        if a pattern matches none or several. Files that were downloaded before are opened offline.
        """
        patterns = [filename, *(additional_files or ())]
        paths = hub.download(repo_id, patterns, local_dir=local_dir, cache_dir=cache_dir)
        return cls(paths[0], **kwargs)

    @with_hints
    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = (),
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Iterable[StoppingCriteria] | None = None,
        logits_processor: Iterable[LogitsProcessor] | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """The completion of a text or of token ids: a dict, or with `stream` an iterator of dicts.

        Dropping or closing the iterator cancels the request.
        """
        if suffix is not None:
            refuse("suffix", suffix, "the prompt of an infill is written by the caller")
        if echo and logprobs is not None:
            refuse("echo", echo, "logprobs of the prompt are those of penstock.Engine.score")
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            top_k=top_k,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            mirostat_mode=mirostat_mode,
            seed=self._request_seed(seed),
            stop=stop,
            logit_bias=logit_bias,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            grammar=grammar,
        )
        if isinstance(prompt, (bytes, bytearray)):
            raise invalid("prompt", prompt, "text or token ids")
        ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = self._request(ids, sampling, max_tokens, logprobs, model, offset=len(prompt))
        if stream:
            return request.stream()
        return request.response(prompt if echo and isinstance(prompt, str) else "")

    __call__ = create_completion

    @with_hints
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = (),
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Iterable[LogitsProcessor] | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """The answer of a chat: a dict, or with `stream` an iterator of dicts."""
        given = chats.check_messages(messages)
        called = chats.Tools.of(functions, function_call, tools, tool_choice)
        called.check_format(self.chat_format)
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            top_k=top_k,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            mirostat_mode=mirostat_mode,
            seed=self._request_seed(seed),
            stop=stop,
            logit_bias=logit_bias,
            logits_processor=logits_processor,
            grammar=called.grammar() or chats.response_grammar(response_format, grammar),
        )
        template = None if self.chat_format is None else chats.CHAT_FORMATS[self.chat_format]
        text = self._tokenizer.apply_chat_template(given, chat_template=template, tools=called.tools)
        ids = self._encode(text, add_special_tokens=self.chat_format is not None)
        request = self._request(
            ids, sampling, max_tokens, top_logprobs if logprobs else None, model, offset=len(text)
        )
        if called.are_parsed:
            params = request.params.replace(tools=called.tools, tool_choice=called.choice or "auto")
            respond = chats.parsed_stream if stream else chats.parsed_response
            return respond(request, given, params)
        if called.called is not None:
            if stream:
                return chats.function_stream(called.called, request.stream())
            return chats.function_response(called.called, request.response())
        return chats.chat_stream(request.stream()) if stream else chats.chat_response(request.response())

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """`create_chat_completion` with objects of the package `openai` in place of dicts."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        found = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in found)
        return ChatCompletion(**found)

    @with_hints
    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> dict[str, Any]:  # noqa: A002
        """The embeddings of texts in the form of OpenAI's API: each is what `embed` returns."""
        found, num_tokens = self.embed([input] if isinstance(input, str) else input, return_count=True)
        data = [
            {"object": "embedding", "embedding": embedding, "index": index}
            for index, embedding in enumerate(found)
        ]
        counts = usage(num_tokens, 0)
        del counts["completion_tokens"]
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": counts}

    @with_hints
    def embed(
        self,
        input: str | Sequence[str],  # noqa: A002
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The embedding of a text, or of each text of a list: floats, or a list of these for each token.

        With `pooling_type()` 0, a text has an embedding for each token. `truncate` cuts texts after
        `n_batch` tokens; without it, longer ones raise `ValueError`. `return_count` adds the number of
        tokens.
        """
        if not self._embedding:
            message = "embedding is False; Llama(embedding=True) makes embeddings"
            raise RuntimeError(message)
        prompts = [self._tokenizer.encode(text) for text in ([input] if isinstance(input, str) else input)]
        longest = max(map(len, prompts), default=0)
        if longest > self.n_batch and not truncate:
            message = f"a text has {longest} tokens; the limit is n_batch={self.n_batch}"
            raise ValueError(message)
        prompts = [prompt[: self.n_batch] for prompt in prompts]
        found: Any = list(
            embeddings.embed(self._started(), prompts, self.pooling_type(), normalize=normalize)
        )
        if isinstance(input, str):
            found = found[0]
        return (found, sum(map(len, prompts))) if return_count else found

    @with_hints
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.8,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Iterable[LogitsProcessor] | None = None,
        stopping_criteria: Iterable[StoppingCriteria] | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Iterator[int]:
        """The token ids that follow these, until the end token, the last one, or the end of the context.

        Dropping or closing the iterator cancels the request.
        """
        sampling = Sampling(
            temperature=temp,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            top_k=top_k,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            mirostat_mode=mirostat_mode,
            seed=self._seed,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            grammar=grammar,
        )
        request = self._request(list(tokens), sampling, None, None, None, offset=0)

        def ids() -> Iterator[int]:
            with self._started().blocking.stream(request.prompt, request.params) as chunks:
                for chunk in chunks:
                    yield from chunk.token_ids

        return ids()

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The token ids of a text in UTF-8. `add_bos` adds the tokens that begin or end a prompt.

        Names of special tokens in the text are these tokens; without `special`, they are refused.
        """
        if not isinstance(text, (bytes, bytearray)):
            raise invalid("text", text, "bytes in UTF-8")
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        found = next(filter(self._is_special, ids), None)
        if found is not None and not special:
            name = self._tokenizer.decode([found], skip_special_tokens=False)
            refuse("special", special, f"the text contains the special token {name!r}")
        return self._tokenizer.encode(text.decode()) if add_bos else ids

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The text of token ids in UTF-8, which may begin or end within a character."""
        shown = [token for token in tokens if special or not self._is_special(token)]
        return b"".join(self._tokenizer.token_bytes(shown))

    def token_bos(self) -> int:
        """The token that begins a text, or -1."""
        bos = self._tokenizer.bos_token_id
        return -1 if bos is None else bos

    def token_eos(self) -> int:
        """The first of the model's end tokens, or -1."""
        return next(iter(self._tokenizer.eos_token_ids), -1)

    def token_nl(self) -> int:
        """The token of a new line."""
        return self._tokenizer.encode("\n", add_special_tokens=False)[-1]

    def n_vocab(self) -> int:
        """The number of token ids."""
        return self._tokenizer.vocabulary_size if self._engine is None else self._info.vocabulary_size

    def n_ctx(self) -> int:
        """The maximum number of tokens of a prompt and its output."""
        return self._info.max_model_len

    def n_embd(self) -> int:
        """The size of an embedding."""
        return int(penstock.describe(self.model_path)["config"]["hidden_size"])

    def pooling_type(self) -> int:
        """The pooling type of embeddings: that of the call, else `last` if the model's files ask for it."""
        if self._pooling_type == LLAMA_POOLING_TYPE_UNSPECIFIED:
            return embeddings.pooling_of(self._info)
        return self._pooling_type

    @property
    def metadata(self) -> dict[str, str]:
        """The configuration of the model, with the names of Hugging Face's `config.json`."""
        config = penstock.describe(self.model_path)["config"]
        return {name: value if isinstance(value, str) else repr(value) for name, value in config.items()}

    def set_seed(self, seed: int) -> None:
        """Set the seed from which those of later requests follow."""
        seed = _checked(seed)
        with self._seed_lock:
            self._seed = seed

    def set_cache(self, cache: object) -> None:
        """Has no effect: prefixes of prompts are always cached."""

    def reset(self) -> None:
        """Has no effect: a request does not depend on those before it."""

    def close(self) -> None:
        """Cancel all requests, stop the threads and free the model. Can be called repeatedly."""
        if self._engine is not None:
            self._engine.blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if "_engine" in self.__dict__:
            self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            reason = f": {_NOT_PROVIDED[name]}" if name in _NOT_PROVIDED else ""
            message = f"Llama has no attribute {name!r}{reason}"
            raise AttributeError(message, name=name, obj=self)

    def _is_special(self, token: int) -> bool:
        decode = self._tokenizer.decode
        return not decode([token]) and bool(decode([token], skip_special_tokens=False))

    def _started(self) -> penstock.Engine:
        if self._engine is None:
            refuse("vocab_only", True, "without weights, Llama only makes tokens of texts")  # noqa: FBT003
        return self._engine

    @property
    def _info(self) -> penstock.ModelInfo:
        return self._started().info

    def _request_seed(self, seed: int | None) -> int:
        """The seed of a request. Without one, it follows from that of the request before."""
        if seed is not None:
            seed = _checked(seed)
        with self._seed_lock:
            self._seed = random.Random(self._seed).randint(0, 2**32) if seed is None else seed  # noqa: S311
            return self._seed

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encode = self._tokenizer.encode
        return encode_prompt(encode, text, self.n_ctx(), name="n_ctx", add_special_tokens=add_special_tokens)

    def _request(
        self,
        ids: list[int],
        sampling: Sampling,
        max_tokens: int | None,
        logprobs: int | None,
        model: str | None,
        *,
        offset: int,
    ) -> Completion:
        """A request, of at most the tokens for which the context has room."""
        if not ids and self.token_bos() >= 0:
            ids = [self.token_bos()]
        room = self.n_ctx() - len(ids)
        if room <= 0:
            message = f"the prompt has {len(ids)} tokens; the context has n_ctx={self.n_ctx()}"
            raise ValueError(message)
        limit = room if max_tokens is None or max_tokens <= 0 else min(max_tokens, room)
        end = next(iter(self._tokenizer.eos_token_ids), None)
        options = sampling.options(max_tokens=limit, end=end)
        if logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": logprobs}
        if self._has_adapter:
            options["adapter"] = _ADAPTER
        return Completion(
            engine=self._started(),
            tokenizer=self._tokenizer,
            prompt=ids,
            params=penstock.SamplingParams(**options),
            model=self.model_path if model is None else model,
            offset=offset,
        )


def _checked(seed: int) -> int:
    """The seed, before later ones follow from it."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise invalid("seed", seed, "an integer")
    return operator.index(seed)
