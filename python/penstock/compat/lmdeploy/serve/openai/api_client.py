"""`APIClient`: a client of a server with OpenAI's routes, with the standard library."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.compat.lmdeploy.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["APIClient", "get_model_list"]

_END = "[DONE]"


def get_model_list(api_url: str) -> list[str]:
    """The names of the models that a server lists at this URL, which ends with `/v1/models`."""
    with urllib.request.urlopen(api_url) as response:  # noqa: S310 - the program's server
        return _names_in(response)


def _names_in(response: Any) -> list[str]:
    """The names in a list of models."""
    return [row["id"] for row in json.load(response)["data"]]


class APIClient:
    """A client of `penstock serve`, or of another server with OpenAI's routes.

        client = APIClient("http://127.0.0.1:8000")
        for answer in client.chat_completions_v1(client.available_models[0], "Why is the sky blue?"):
            print(answer["choices"][0]["message"]["content"])

    The methods raise `urllib.error.HTTPError` for a request that the server refuses; its body has the reason.
    """

    def __init__(self, api_server_url: str, api_key: str | None = None, **_: Any) -> None:
        self.api_server_url = api_server_url
        self.chat_completions_v1_url = f"{api_server_url}/v1/chat/completions"
        self.completions_v1_url = f"{api_server_url}/v1/completions"
        self.models_v1_url = f"{api_server_url}/v1/models"
        self.api_key = api_key
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._available_models: list[str] | None = None

    @property
    def available_models(self) -> list[str]:
        """The names of the server's models; asked for once."""
        if self._available_models is None:
            with self._open(self.models_v1_url) as response:
                self._available_models = _names_in(response)
        return self._available_models

    def encode(
        self,
        input: str,  # noqa: A002 - LMDeploy's name
        do_preprocess: bool = False,
        add_bos: bool = True,
    ) -> tuple[list[int], int]:
        """The token ids of a text, and their number. With `do_preprocess` the text is a chat."""
        fields: dict[str, Any] = {"prompt": input, "add_special_tokens": add_bos}
        if do_preprocess:
            fields = {"messages": [{"role": "user", "content": input}]}
        with self._open(f"{self.api_server_url}/tokenize", fields) as response:
            answer = json.load(response)
        return answer["tokens"], answer["count"]

    def chat_completions_v1(
        self,
        model: str,
        messages: str | Sequence[dict[str, Any]],
        temperature: float | None = 0.7,
        top_p: float | None = 1.0,
        n: int | None = 1,
        max_tokens: int | None = 512,
        stop: str | Sequence[str] | None = None,
        stream: bool | None = False,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        user: str | None = None,
        repetition_penalty: float | None = 1.0,
        session_id: int | None = -1,
        ignore_eos: bool | None = False,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """The response to a chat, or its chunks; other keywords are further fields of the request."""
        fields = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        return self._post(self.chat_completions_v1_url, {**fields, **kwargs})

    def completions_v1(
        self,
        model: str,
        prompt: str | Sequence[Any],
        suffix: str | None = None,
        temperature: float | None = 0.7,
        n: int | None = 1,
        max_tokens: int | None = 16,
        stream: bool | None = False,
        stop: str | Sequence[str] | None = None,
        top_p: float | None = 1.0,
        top_k: int | None = 40,
        user: str | None = None,
        repetition_penalty: float | None = 1.0,
        session_id: int | None = -1,
        ignore_eos: bool | None = False,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """The response to a prompt, or its chunks; other keywords are further fields of the request."""
        fields = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        return self._post(self.completions_v1_url, {**fields, **kwargs})

    def chat_interactive_v1(self, *_: Any, **__: Any) -> NoReturn:
        """Raises `UnsupportedError`: the server has no sessions; `AsyncEngine.generate` has."""
        message = "chat_interactive_v1 is not supported: the server has no sessions; send all messages"
        raise UnsupportedError(message)

    chat = end_session = chat_interactive_v1

    def _post(self, url: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(url, fields) as response:
            if not fields.get("stream"):
                yield json.load(response)
                return
            for line in response:
                text = line.decode().strip().removeprefix("data: ")
                if text == _END:
                    return
                if text.startswith("{"):  # not a comment that keeps the connection open
                    yield json.loads(text)

    def _open(self, url: str, fields: dict[str, Any] | None = None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(url, body, self.headers)  # noqa: S310 - the program's server
        return urllib.request.urlopen(request)  # noqa: S310
