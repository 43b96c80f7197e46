"""`chat`: a turn of a `Session`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.compat.lmdeploy.batches import response_of
from penstock.compat.lmdeploy.errors import ErrorCode
from penstock.compat.lmdeploy.generation import Ask
from penstock.compat.lmdeploy.streams import read_blocking

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.compat.lmdeploy.engine_context import EngineContext
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.response import Response
    from penstock.compat.lmdeploy.sessions import Session

__all__ = ["turn"]


def turn(
    context: EngineContext,
    session: Session,
    prompt: Any,
    config: GenerationConfig,
    *,
    streams: bool,
    do_preprocess: bool,
    adapter_name: str | None,
    variables: Mapping[str, Any],
) -> Iterator[Response]:
    """The parts of the answer. The session has the turn before its last part is returned."""
    if not context.sessions.is_busy(session.session_id):
        session.update(prompt=prompt, response=None)
    messages, template = prompt, context.template_of_adapter(adapter_name)
    rendering = (template, variables)
    is_new = session.is_changed(rendering) or context.sessions.length(session.session_id) < session.step
    if is_new or session.step == 0 or not getattr(template, "can_continue", True):
        is_new = True
        context.sessions.end(session.session_id, only_idle=True)
        messages = _transcript(session.history, prompt)
    ask = Ask(
        messages,
        config,
        variables=variables,
        do_preprocess=do_preprocess,
        adapter_name=adapter_name,
        start=is_new,
        end=False,
        step=0 if is_new else session.step,
        streams=streams,
    )
    answer: Response | None = None
    for item in read_blocking(context, session.session_id, ask):
        part = response_of(item)
        if answer is None:
            answer = dataclasses.replace(part, token_ids=[*part.token_ids])
        else:
            answer.extend(part)
        if part.finish_reason is not None and part.error_code != ErrorCode.REQUEST_CONFLICT:
            _end(context, session, prompt, answer, rendering)
        yield part


def _transcript(history: list[tuple[Any, str]], prompt: Any) -> Any:
    """The messages of a session and the next one."""
    if not history:
        return prompt
    messages: list[Any] = []
    for user, answer in history:
        messages += _messages(user)
        messages.append({"role": "assistant", "content": answer})
    return messages + _messages(prompt)


def _messages(prompt: Any) -> list[Any]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _end(context: EngineContext, session: Session, prompt: Any, answer: Response, rendering: object) -> None:
    session.response = answer
    if answer.finish_reason in ("stop", "length"):
        session.history.append((prompt, answer.text))
        session.set_computed(context.sessions.length(session.session_id), rendering)
