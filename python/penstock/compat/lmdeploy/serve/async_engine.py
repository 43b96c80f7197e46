"""`AsyncEngine`: an engine with sessions, for event loops, threads and plain scripts."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread

from penstock.compat.lmdeploy import batches, chats, scores
from penstock.compat.lmdeploy import prompts as forms
from penstock.compat.lmdeploy.checks import check_arguments, place, refuse, token_ids
from penstock.compat.lmdeploy.engine_base import EngineBase
from penstock.compat.lmdeploy.engine_configs import PYTORCH_CONFIGS
from penstock.compat.lmdeploy.engine_context import EngineContext
from penstock.compat.lmdeploy.engine_options import open_engine, resolve
from penstock.compat.lmdeploy.errors import UnsupportedError
from penstock.compat.lmdeploy.generation import Ask, GenOut
from penstock.compat.lmdeploy.instances import Instance
from penstock.compat.lmdeploy.model import best_template, templates_named
from penstock.compat.lmdeploy.sessions import Session, SessionTable, forgetter
from penstock.compat.lmdeploy.streams import AsyncStream
from penstock.compat.lmdeploy.tokenizer import Tokenizer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from penstock.compat.lmdeploy.engine_configs import AnyEngineConfig
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.model import ChatTemplateConfig
    from penstock.compat.lmdeploy.response import Response

__all__ = ["AsyncEngine", "GenOut", "Session"]

_log = logging.getLogger("penstock.lmdeploy")


class AsyncEngine(EngineBase):
    """A model, its sessions and its requests.

        engine = AsyncEngine("internlm/internlm-chat-7b", backend_config=EngineConfig(session_len=1024))
        async for item in engine.generate("Hi", session_id=1):
            print(item.response, end="", flush=True)

    `model_path` is a model as `penstock.Engine` takes it. The arguments after it are described in
    docs/lmdeploy.md. The constructor loads the model; `close`, leaving a `with` block or dropping the engine
    frees it.

    All methods can be called from any thread. Those that are not asynchronous need no event loop, and also
    work where one runs, which they block. `generate` runs on any event loop of asyncio or trio.

    Raises `ArgumentError` for a value that is refused, and what `penstock.Engine` raises.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        model_name: str | None = None,
        backend: Literal["turbomind", "pytorch"] | None = "turbomind",
        backend_config: AnyEngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        instance_num: int | None = 32,
        tp: int | None = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._has_warned = False
        forms.check_template(chat_template_config)
        model, options, self.settings = resolve(
            model_path,
            backend,
            backend_config,
            model_name=model_name,
            instance_num=instance_num,
            tp=tp,
            **kwargs,
        )
        self.engine = engine = open_engine(model, options, self.settings.adapters)
        self.backend_config = config = self.settings.config
        self.backend = "pytorch" if isinstance(config, PYTORCH_CONFIGS) else "turbomind"
        self.model_name = self.settings.model_name
        self.tp = 1
        self.sessions = SessionTable(forgetter(engine))
        self.session_len = engine.info.max_model_len
        width = engine.info.max_num_seqs
        self.instance_num = self.max_concurrency = min(self.settings.max_concurrency or width, width)
        try:
            self.tokenizer = Tokenizer(model)
            self._template_arguments: Any = {"model_path": str(model), "model_name": self.settings.model_name}
            self.chat_template = best_template(
                self.tokenizer, config=chat_template_config, **self._template_arguments
            )
            self._adapter_templates = templates_named(self.settings.adapters)
        except BaseException:
            engine.close()
            raise

    def _context(self) -> EngineContext:
        return EngineContext(
            engine=self.engine,
            tokenizer=self.tokenizer,
            sessions=self.sessions,
            session_len=self.session_len,
            max_concurrency=self.max_concurrency,
            uses_prefix_cache=self.settings.enable_prefix_caching,
            batches=self.batches,
            template_of_adapter=self.template_of_adapter,
            check_sampling=self.check_sampling,
            check_open=self.check_open,
            is_closed=lambda: self.is_closed,
        )

    # ---- many prompts

    def __call__(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
        chat_template_config: ChatTemplateConfig | bool | int | None = None,
        request_output_len: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool | None = None,
        do_preprocess: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The outputs of a prompt or of a list of prompts; see `infer`.

        The third positional argument can also be `do_preprocess`, or `request_output_len`, as in other
        versions.
        """
        if isinstance(chat_template_config, bool):
            do_preprocess, chat_template_config = chat_template_config, None
        elif isinstance(chat_template_config, int):
            request_output_len, chat_template_config = chat_template_config, None
        return self.infer(
            prompts,
            gen_config,
            do_preprocess,
            chat_template_config=chat_template_config,
            request_output_len=request_output_len,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            repetition_penalty=repetition_penalty,
            ignore_eos=ignore_eos,
            **kwargs,
        )

    batch_infer = __call__

    def infer(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        *,
        chat_template_config: ChatTemplateConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """The outputs of a prompt or of a list of prompts, in the order of the prompts.

        A prompt is text or a list of messages. `gen_config` is one for all prompts, or a list with one for
        each, in which `None` is the default. `adapter_name` is the LoRA adapter that computes the outputs, by
        default none. Without `gen_config`, the keywords `request_output_len`, `top_k`, `top_p`,
        `temperature`, `repetition_penalty`, `ignore_eos` and `stop_words` apply. Other keywords, and those in
        `chat_template_kwargs`, are variables of the chat template, such as `tools` and `enable_thinking`.

        Returns text if the engine or the call has arguments of LMDeploy's first pipeline, else `Response`
        objects. A request that fails has the reason `error`, and its text is empty; the others continue, and
        the reason is logged.

        Raises `ArgumentError` for wrong arguments, before anything is computed, and
        `penstock.EngineStoppedError` if the engine is closed.
        """
        given, variables = forms.early_of(kwargs), forms.variables_of("infer", kwargs)
        self.check_open()
        check_arguments(do_preprocess=do_preprocess, use_tqdm=use_tqdm, adapter_name=adapter_name)
        asked, is_single = forms.split(prompts)
        configs = forms.configs_of(gen_config, len(asked), given)
        template = self.template_of(chat_template_config)
        asks = (
            Ask(prompt, config, None, template, variables, do_preprocess, adapter_name, streams=False)
            for prompt, config in zip(asked, configs, strict=True)
        )
        responses = batches.infer(self._context(), asks, len(asked), use_tqdm=use_tqdm)
        outputs: list[Any] = list(responses)
        if self.settings.returns_text or (gen_config is None and forms.takes_early(given)):
            outputs = [response.text for response in responses]
        return outputs[0] if is_single else outputs

    def stream_infer(
        self,
        prompts: Any,
        *args: Any,
        sessions: Session | Sequence[Session] | None = None,
        gen_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        stream_response: bool = True,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        **kwargs: Any,
    ) -> Iterator[Response]:
        """The outputs of a prompt or of a list of prompts, as an iterator of parts.

        Parts of different prompts are interleaved: `index` is the position of the prompt. The last part of a
        prompt has a `finish_reason`. With `stream_response=False` a prompt has one part with its complete
        output, and the last one.

        `sessions` has one session for each prompt; `Session.abort` cancels its request. `sequence_start`,
        `sequence_end` and `step` are those of `generate`.

        Positional arguments after the prompts are `sessions`, `gen_config`, `do_preprocess`, `adapter_name`
        and `stream_response`, or these without `sessions`, as in earlier versions.

        The requests run while the iterator is read; dropping or closing it cancels them. Takes the other
        arguments of `infer` and raises as it does.
        """
        values: dict[str, Any] = {
            "sessions": sessions,
            "gen_config": gen_config,
            "do_preprocess": do_preprocess,
            "adapter_name": adapter_name,
            "stream_response": stream_response,
        }
        place("stream_infer", args, [*values][forms.is_early_order(args) :], values)
        sessions, gen_config, do_preprocess, adapter_name, stream_response = values.values()
        given, variables = forms.early_of(kwargs), forms.variables_of("stream_infer", kwargs)
        self.check_open()
        flags = {"do_preprocess": do_preprocess, "stream_response": stream_response}
        check_arguments(
            **flags, sequence_start=sequence_start, sequence_end=sequence_end, adapter_name=adapter_name
        )
        asked, _is_single = forms.split(prompts)
        configs = forms.configs_of(gen_config, len(asked), given)
        forms.check_step(step)
        ids = self._session_ids(sessions, len(asked))
        if ids is None and not (sequence_start and sequence_end):
            refuse("sessions", None, "given with sequence_start=False or sequence_end=False")
        asks = (
            Ask(
                prompt,
                config,
                variables=variables,
                do_preprocess=do_preprocess,
                adapter_name=adapter_name,
                start=sequence_start,
                end=sequence_end,
                step=step,
                streams=stream_response,
            )
            for prompt, config in zip(asked, configs, strict=True)
        )
        return batches.read(self._context(), enumerate(asks), streams=stream_response, session_ids=ids)

    def chat(
        self,
        prompt: Any,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
        *,
        do_preprocess: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Add a turn to a session, by default a new one.

        Returns the session; its `response` is the answer. With `stream_response` returns an iterator of the
        parts of the answer. A turn that fails or is cancelled, also by leaving the loop, changes neither
        `history` nor `step`; a second turn while one runs changes nothing and is logged. Only the new
        messages are computed. Raises as `infer` does.
        """
        given, variables = forms.early_of(kwargs), forms.variables_of("chat", kwargs)
        self.check_open()
        check_arguments(
            stream_response=stream_response, do_preprocess=do_preprocess, adapter_name=adapter_name
        )
        forms.check_prompt("prompt", prompt)
        if session is None:
            session = self.session()
        elif not isinstance(session, Session):
            refuse("session", session, "a Session or None")
        session.bind(self)
        has_none = gen_config is None and not forms.takes_early(given)
        config = forms.config_of(session.gen_config if has_none else gen_config, given)
        parts = chats.turn(
            self._context(),
            session,
            prompt,
            config,
            streams=stream_response,
            do_preprocess=do_preprocess,
            adapter_name=adapter_name,
            variables=variables,
        )
        if stream_response:
            return parts
        for _ in parts:
            pass
        return session

    # ---- scores

    def get_ppl(self, input_ids: Any, *, adapter_name: str | None = None) -> list[float]:
        """The mean cross entropy of each text: the logarithm of its perplexity.

        `input_ids` are the token ids of one text or a list of them, at least two tokens each. `adapter_name`
        is the LoRA adapter that computes them, by default none. A text longer than `session_len` is computed
        in overlapping windows. Raises `ArgumentError` for other values, and what `penstock.Engine.score`
        raises.
        """
        return scores.mean_cross_entropies(self._context(), input_ids, adapter_name)

    def get_logits(self, input_ids: Any, *, adapter_name: str | None = None) -> Any:
        """The logits of all tokens of one text or of several, as a `torch.Tensor` of float32.

        Its shape is `(texts, tokens of the longest text, vocabulary)`; shorter texts end with zeros. Raises
        `penstock.InvalidRequestError` for a text of `session_len` tokens or more, or of logits above 1 GiB.
        """
        return scores.logits(self._context(), input_ids, adapter_name)

    async def async_get_ppl(self, input_ids: Any, *, adapter_name: str | None = None) -> list[float]:
        """The same as `get_ppl`, in a worker thread."""
        get_ppl = partial(self.get_ppl, input_ids, adapter_name=adapter_name)
        return await anyio.to_thread.run_sync(get_ppl, abandon_on_cancel=True)

    async def async_get_logits(self, input_ids: Any, *, adapter_name: str | None = None) -> Any:
        """The same as `get_logits`, in a worker thread."""
        get_logits = partial(self.get_logits, input_ids, adapter_name=adapter_name)
        return await anyio.to_thread.run_sync(get_logits, abandon_on_cancel=True)

    def get_reward_score(self, input_ids: Any) -> list[float]:
        """Raises `UnsupportedError`: models with a reward head are not supported yet."""
        message = f"{self.engine.info.architecture} is not a reward model; these are not supported yet"
        raise UnsupportedError(message)

    # ---- one request

    def generate(
        self,
        messages: Any = None,
        session_id: int | Session | None = None,
        gen_config: GenerationConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        stream_response: bool = True,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        request_output_len: int | None = None,
        stop: bool = False,
        stop_words: list[str] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        input_ids: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> AsyncStream:
        """The output of one request, as an async generator of `GenOut`.

        `messages` is text or a list of messages; `input_ids` are token ids in place of it. Other keywords are
        variables of the chat template; see `infer`.

        `sequence_start` begins a session, `sequence_end` ends it when the request has ended. With
        `sequence_start=False` the messages follow the session's tokens, or with `step` above 0 its first
        `step` tokens. A session continues after a cancelled request, with the tokens that were read.
        `stop=True` cancels the session's request instead.

        A request that fails has one item, with the reason `error`: the session is unknown
        (`session_not_exist`) or has an unfinished request (`request_conflict`), or the prompt is not valid.
        A prompt that does not fit into the session has one item, without text and with the reason `length`.

        Dropping or closing the generator, and cancelling the task that reads it, cancel the request. Raises
        `ArgumentError` for wrong arguments, `penstock.EngineStoppedError` if the engine is closed.
        """
        early = {
            "request_output_len": request_output_len,
            "top_k": top_k,
            "top_p": top_p,
            "temperature": temperature,
            "repetition_penalty": repetition_penalty,
            "ignore_eos": ignore_eos,
            "stop_words": stop_words,
        }
        variables = forms.variables_of("generate", kwargs)
        self.check_open()
        forms.check_step(step)
        if not stop and (messages is None) == (input_ids is None):
            refuse("messages", messages, "given, or else input_ids")
        flags = {"stream_response": stream_response, "stop": stop, "do_preprocess": do_preprocess}
        check_arguments(
            **flags, sequence_start=sequence_start, sequence_end=sequence_end, adapter_name=adapter_name
        )
        if session_id is None and not (sequence_start and sequence_end):
            name = "sequence_end" if sequence_start else "sequence_start"
            refuse("session_id", session_id, f"given with {name}=False")
        if input_ids is not None:
            input_ids = token_ids("input_ids", input_ids)
        if not stop and messages is not None:
            forms.check_prompt("messages", messages)
        ask = Ask(
            messages,
            forms.config_of(gen_config, early),
            input_ids,
            self.template_of(chat_template_config),
            variables,
            do_preprocess,
            adapter_name,
            start=sequence_start,
            end=sequence_end,
            step=step,
            streams=stream_response,
        )
        session_id = self.sessions.id_of(session_id)
        stream = AsyncStream(self._context(), session_id, ask)
        if stop:
            history = self.sessions.length(session_id)
            self.sessions.stop(session_id)
            stream.set_items([GenOut("", history, 0, 0)])
        return stream

    async def get_generator(self, stop: bool, session_id: int | Session) -> Instance:
        """An object for requests of token ids. Never waits: it can be used by any number of sessions."""
        self.check_open()
        return Instance(self._context())

    def template_of(self, config: ChatTemplateConfig | None) -> Any:
        """The chat template of one call; `None` for the engine's."""
        forms.check_template(config)
        if config is None:
            return None
        return best_template(self.tokenizer, config=config, **self._template_arguments)

    def template_of_adapter(self, adapter_name: str | None) -> Any:
        """The chat template that an adapter's name is that of, else the engine's."""
        return self._adapter_templates.get(adapter_name, self.chat_template)

    def check_sampling(self, config: GenerationConfig) -> None:
        """Log once that parameters of sampling have no effect."""
        if config.lacks_sampling and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "temperature=%s, top_p=%s and min_p=%s have no effect: the most likely token is selected; "
                "set do_sample=True, or top_k",
                config.temperature,
                config.top_p,
                config.min_p,
            )
